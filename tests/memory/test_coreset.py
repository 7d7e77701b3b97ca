import numpy as np
import pytest
import torch
from helpers.draws import generator

from lit_fedad.memory.coreset import greedy_k_center
from lit_fedad.memory.knn import nearest


def covering_radius(points, selected):
    """The largest distance of a point to its nearest selected point."""
    return nearest(points, points[selected], k=1)[0].max().item()


def textbook_greedy(points, size, start):
    """One selection a pass, distances from the differences, lowest index first among ties."""
    points = points.double().numpy()
    nearest, selected = np.full(len(points), np.inf), [start]
    while len(selected) < size:
        nearest = np.minimum(nearest, ((points - points[selected[-1]]) ** 2).sum(1))
        nearest[selected] = -1
        selected.append(int(nearest.argmax()))
    return selected


def clustered(count, channels, seed=0):
    source = generator(seed)
    centres = 4 * torch.randn(20, channels, generator=source, dtype=torch.float64)
    noise = torch.randn(count, channels, generator=source, dtype=torch.float64)
    return centres[torch.randint(20, (count,), generator=source)] + noise


@pytest.mark.parametrize(
    ("points", "size"),
    [
        (torch.randn(50, 3, generator=generator(), dtype=torch.float64), 49),
        (clustered(400, 2), 120),
        (clustered(3000, 16), 300),
        (torch.randn(3000, 40, generator=generator(), dtype=torch.float64), 600),
    ],
    ids=["nearly all", "plane", "clusters", "one cloud"],
)
def test_the_selection_is_the_textbook_greedy_one(points, size):
    found = greedy_k_center(points, size, generator=generator(), start=5)
    assert found.tolist() == textbook_greedy(points, size, 5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_ties_and_duplicates_go_to_the_lowest_index_as_in_the_textbook(dtype):
    # Small integers around a mean of exactly zero: every precision computes these distances without rounding,
    # and nearly all of them are tied.
    points = torch.randint(-2, 3, (500, 3), generator=generator())
    balanced = torch.cat([points, -points]).to(dtype)
    assert len(balanced.unique(dim=0)) < 400
    found = greedy_k_center(balanced, 400, generator=generator(), start=3)
    assert found.tolist() == textbook_greedy(balanced, 400, 3)
    assert len(set(found.tolist())) == 400


def test_single_precision_covers_as_well_as_the_textbook():
    points = clustered(4000, 64).float()
    found = greedy_k_center(points, 400, generator=generator(), start=0)
    expected = torch.tensor(textbook_greedy(points, 400, 0))
    assert covering_radius(points, found) == pytest.approx(covering_radius(points, expected), rel=1e-3)


def test_more_places_than_points_select_every_point():
    points = torch.randn(5, 2)
    for size in (5, 9):
        assert greedy_k_center(points, size, generator=generator()).tolist() == [0, 1, 2, 3, 4]


def test_a_single_place_is_the_start():
    assert greedy_k_center(torch.randn(9, 2), 1, generator=generator(), start=4).tolist() == [4]


def test_identical_points_fill_the_places_with_distinct_indices():
    found = greedy_k_center(torch.ones(100, 4), 30, generator=generator(), start=50)
    assert found.tolist() == [50, *range(29)]


def test_the_generator_decides_the_start():
    points = clustered(300, 4)
    starts = {greedy_k_center(points, 3, generator=generator(seed))[0].item() for seed in range(20)}
    assert len(starts) > 10
    first, again = (greedy_k_center(points, 30, generator=generator(7)) for _ in range(2))
    assert torch.equal(first, again)


def test_a_projection_selects_greedily_in_fewer_dimensions():
    points = clustered(1500, 200).float()
    found = greedy_k_center(points, 150, generator=generator(1), start=0, projection=32)
    directions = torch.randn(200, 32, generator=generator(1)) / 32**0.5
    projected = points @ directions
    radius = covering_radius(projected, found)
    expected = covering_radius(projected, torch.tensor(textbook_greedy(projected, 150, 0)))
    assert radius == pytest.approx(expected, rel=1e-3)
    exact = greedy_k_center(points, 150, generator=generator(1), start=0)
    assert covering_radius(points, found) < 1.25 * covering_radius(points, exact)
    wide = greedy_k_center(points, 150, generator=generator(1), start=0, projection=200)
    assert torch.equal(wide, exact)  # nothing to gain: not projected


def test_bad_arguments_are_refused():
    with pytest.raises(ValueError, match="positive size"):
        greedy_k_center(torch.randn(5, 2), 0, generator=generator())
    with pytest.raises(ValueError, match="start=5"):
        greedy_k_center(torch.randn(5, 2), 2, generator=generator(), start=5)
