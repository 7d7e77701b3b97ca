from functools import partial
from itertools import pairwise

import numpy as np
import pytest
import torch
from helpers.draws import generator
from scipy import stats
from scipy.spatial.distance import cdist
from sklearn.cluster import KMeans

from lit_fedad.core.errors import UserError
from lit_fedad.memory.kmeans import _reassign, add_by_slot, kmeans, plus_plus_seeds


def blobs(count=600, channels=8, centres=12, seed=0):
    source = generator(seed)
    middle = 3 * torch.randn(centres, channels, generator=source)
    return middle[torch.randint(centres, (count,), generator=source)] + torch.randn(
        count, channels, generator=source
    )


@pytest.mark.parametrize("weighted", [False, True])
def test_lloyd_agrees_with_sklearn_from_the_same_start(weighted):
    points = blobs()
    weights = torch.rand(len(points), generator=generator(1)) if weighted else None
    initial = points[:12]
    found = kmeans(
        points, 12, generator=generator(), weights=weights, initial=initial, max_steps=7, tolerance=0
    )
    reference = KMeans(12, init=initial.double().numpy(), n_init=1, max_iter=7, tol=0)
    reference.fit(
        points.double().numpy(), sample_weight=None if weights is None else weights.double().numpy()
    )
    np.testing.assert_allclose(found.centroids.numpy(), reference.cluster_centers_, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(found.assignment.numpy(), reference.labels_)
    assert found.inertia == pytest.approx(reference.inertia_, rel=1e-5)
    assert found.steps == reference.n_iter_
    mass = np.bincount(reference.labels_, None if weights is None else weights.numpy(), minlength=12)
    np.testing.assert_allclose(found.counts.numpy(), mass, rtol=1e-5)


def test_one_generator_gives_one_clustering():
    points = blobs()
    first, again, other = (kmeans(points, 20, generator=generator(seed)) for seed in (5, 5, 6))
    assert torch.equal(first.centroids, again.centroids)
    assert not torch.equal(first.centroids, other.centroids)


def test_identical_maps_seeded_with_the_map_return_the_map():
    one_map = torch.randn(60, 16, generator=generator())
    one_map[7] = one_map[3]  # two positions that look alike
    found = kmeans(one_map.repeat(5, 1), 60, generator=generator(), initial=one_map)
    assert torch.equal(found.centroids, one_map)
    assert found.counts.sum() == 300


def test_integer_weights_count_as_repetitions():
    points = blobs(120)
    weights = torch.randint(0, 4, (120,), generator=generator(1))
    weighted = kmeans(points, 6, generator=generator(), weights=weights, initial=points[:6])
    repeated = kmeans(points.repeat_interleave(weights, 0), 6, generator=generator(), initial=points[:6])
    torch.testing.assert_close(weighted.centroids, repeated.centroids)
    torch.testing.assert_close(weighted.counts, repeated.counts)
    assert weighted.inertia == pytest.approx(repeated.inertia)


def test_light_points_keep_their_mean_when_heavy_ones_leave():
    points = torch.tensor([[0.0], [0.3], [3.0], [-4.0], [4.0], [-5.0]])
    weights = torch.tensor([1e-9, 1e-9, 1e6, 1e6, 1e6, 1e6], dtype=torch.float64)
    found = kmeans(
        points, 3, generator=generator(), weights=weights, initial=torch.tensor([[0.0], [6.9], [-8.1]])
    )
    assert found.centroids.flatten().tolist() == pytest.approx([0.15, 3.5, -4.5])


def test_after_a_move_of_few_centroids_every_point_is_at_its_nearest():
    """Most comparisons are left out then; some points' own centroid has gone, and one that stayed is nearest."""
    points, last = (torch.randn(n, 2, generator=generator(n)) for n in (400, 30))
    centroids = last.clone()
    centroids[:4] += 0.5
    distances, assignment = torch.cdist(points.double(), last.double()).min(1)
    expected, nearest = torch.cdist(points.double(), centroids.double()).min(1)
    assert ((assignment < 4) & (nearest >= 4)).any()
    assert ((assignment >= 4) & (nearest < 4)).any()
    found, places = _reassign(points, last, centroids, distances.float(), assignment)
    assert torch.equal(places, nearest)
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5)


def test_an_empty_cluster_keeps_its_centroid():
    points = torch.tensor([[0.0], [1.0], [2.0]])
    found = kmeans(points, 2, generator=generator(), initial=torch.tensor([[1.5], [99.0]]))
    assert found.centroids.tolist() == [[1.0], [99.0]]
    assert found.counts.tolist() == [3, 0]


def test_fewer_points_than_clusters_become_centroids_with_surplus_copies():
    points, weights = blobs(4), torch.tensor([1.0, 2.0, 0.0, 3.0])
    found = kmeans(points, 9, generator=generator(), weights=weights)
    assert found.centroids.shape == (9, 8)
    assert torch.equal(found.centroids[:4], points)
    assert found.counts.tolist() == [1, 2, 0, 3, 0, 0, 0, 0, 0]
    assert (cdist(found.centroids[4:], points[[0, 1, 3]]).min(1) == 0).all()
    assert (found.inertia, found.assignment.tolist()) == (0, [0, 1, 2, 3])


def test_more_clusters_than_distinct_points_still_fill_all_places():
    points = torch.tensor([[0.0, 1.0], [5.0, 5.0]]).repeat(50, 1)
    found = kmeans(points, 7, generator=generator())
    assert found.centroids.shape == (7, 2)
    assert found.inertia == 0
    assert found.counts.sum() == 100
    assert len(found.centroids.unique(dim=0)) == 2


def test_lloyd_never_raises_the_inertia_and_stops_on_tolerance():
    points = blobs(1000)
    inertias = [
        kmeans(points, 15, generator=generator(), initial=points[:15], max_steps=steps, tolerance=0).inertia
        for steps in range(6)
    ]
    assert all(after <= before for before, after in pairwise(inertias))
    gains = [(before - after) / before for before, after in pairwise(inertias)]
    assert gains[0] > gains[1] > gains[2] > gains[3]
    between = (gains[1] + gains[2]) / 2  # at a gain itself, rounding would decide
    stopped = kmeans(points, 15, generator=generator(), initial=points[:15], tolerance=between)
    assert stopped.steps == 3


@pytest.mark.slow
def test_seeds_follow_the_weighted_squared_distance_law():
    # Second seeds, given the first, are counted over many generators and compared with w * D^2.
    points = torch.tensor([[0.0], [1.0], [3.0], [4.0]])
    mass = torch.tensor([1.0, 4.0, 1.0, 2.0], dtype=torch.float64)
    draws = torch.stack([plus_plus_seeds(points, 2, mass, generator(seed)) for seed in range(4000)])
    first = draws[:, 0].bincount(minlength=4)
    assert stats.chisquare(first, mass / mass.sum() * len(draws)).pvalue > 1e-3
    second = draws[draws[:, 0] == 1][:, 1].bincount(minlength=4).double()
    law = mass * (points[:, 0] - 1).square()
    assert second[1] == 0
    others = [0, 2, 3]
    assert stats.chisquare(second[others], (law / law.sum() * second.sum())[others]).pvalue > 1e-3


@pytest.mark.slow
def test_batched_seeding_has_the_law_of_one_by_one_seeding():
    # The third seed is drawn by rejection within a batch: compare with the textbook chain, enumerated.
    points = torch.tensor([[0.0], [1.0], [3.0], [7.0], [8.0]])
    mass = torch.ones(5, dtype=torch.float64)
    squares = (points - points.T).square().double()
    expected = torch.zeros(5, dtype=torch.float64)
    for first in range(5):
        for second in range(5):
            left = torch.minimum(squares[first], squares[second])
            if left.sum() > 0 and squares[first, second] > 0:
                expected += squares[first, second] / squares[first].sum() / 5 * left / left.sum()
    third = torch.stack([plus_plus_seeds(points, 3, mass, generator(seed))[2] for seed in range(4000)])
    assert stats.chisquare(third.bincount(minlength=5), expected / expected.sum() * 4000).pvalue > 1e-3


def test_plus_plus_beats_random_seeding_on_separated_clusters():
    points = torch.cat([blobs(300, centres=1, seed=s) + 100 * s for s in range(4)] + [blobs(5) - 500])
    careful, random = [], []
    for seed in range(10):
        uniform = points[torch.randperm(len(points), generator=generator(seed))[:5]]
        for inertias, start in ((careful, None), (random, uniform)):
            found = kmeans(points, 5, generator=generator(seed), initial=start, max_steps=0)
            inertias.append(found.inertia)
    assert np.mean(careful) < np.mean(random) / 10


def test_seeds_are_distinct_points_of_positive_weight():
    points, weights = blobs(50), torch.cat([torch.zeros(20), torch.ones(30)])
    found = kmeans(points, 30, generator=generator(), weights=weights, max_steps=0)
    assert torch.equal(found.centroids.unique(dim=0), points[20:].unique(dim=0))


def test_half_precision_points_give_single_precision_centroids():
    points = blobs().half()
    found = kmeans(points, 10, generator=generator())
    assert found.centroids.dtype == torch.float32
    expected = kmeans(points.float(), 10, generator=generator())
    assert torch.equal(found.centroids, expected.centroids)


def test_add_by_slot_matches_numpy():
    rows, slots = blobs(200), torch.randint(7, (200,), generator=generator())
    mass = torch.rand(200, generator=generator(1), dtype=torch.float64)
    sums = torch.ones(7, 8, dtype=torch.float64)
    add_by_slot(sums, rows, slots, mass)
    expected = np.ones((7, 8))
    np.add.at(expected, slots.numpy(), rows.double().numpy() * mass.numpy()[:, None])
    np.testing.assert_allclose(sums.numpy(), expected, rtol=1e-12)


def test_bad_input_is_refused():
    points = blobs(10)
    with pytest.raises(UserError, match="all k-means weights are zero"):
        kmeans(points, 2, generator=generator(), weights=torch.zeros(10))
    with pytest.raises(UserError, match="no points"):
        kmeans(points[:0], 2, generator=generator())
    with pytest.raises(ValueError, match="non-negative"):
        kmeans(points, 2, generator=generator(), weights=-torch.ones(10))
    with pytest.raises(ValueError, match="non-negative"):
        kmeans(points, 2, generator=generator(), weights=torch.ones(9))
    with pytest.raises(ValueError, match=r"must be \[2, 8\]"):
        kmeans(points, 2, generator=generator(), initial=points[:3])
    with pytest.raises(ValueError, match="at least one cluster"):
        kmeans(points, 0, generator=generator())


# ------------------------------------------------------------------------------------------------- spherical

spherical_kmeans = partial(kmeans, tolerance=0, spherical=True)


def rows(count: int = 60, width: int = 4) -> torch.Tensor:
    return (
        torch.randn(count, width, generator=generator(5)) + torch.eye(width)[torch.arange(count) % width] * 4
    )


def test_centres_are_normalised_sums_of_the_rows_nearest_in_angle():
    points = rows()
    found = spherical_kmeans(points, 4, generator=generator(), max_steps=30)
    unit = (points / points.norm(dim=1, keepdim=True)).double().numpy()
    centres = found.centroids.double().numpy()
    np.testing.assert_allclose(np.linalg.norm(centres, axis=1), 1, rtol=1e-6)
    owner = (unit @ centres.T).argmax(1)
    np.testing.assert_array_equal(owner, found.assignment.numpy())
    for cluster in range(4):
        total = unit[owner == cluster].sum(0)
        np.testing.assert_allclose(centres[cluster], total / np.linalg.norm(total), atol=1e-5)
    assert found.counts.tolist() == np.bincount(owner, minlength=4).tolist()


def test_length_does_not_matter_and_weights_are_repetitions():
    points = rows()
    scale = torch.rand(len(points), 1, generator=generator(1)) + 0.5
    one = spherical_kmeans(points, 4, generator=generator(), max_steps=30)
    other = spherical_kmeans(scale * points, 4, generator=generator(), max_steps=30)
    torch.testing.assert_close(one.centroids, other.centroids, rtol=1e-4, atol=1e-5)
    weights = torch.tensor([3.0, 1.0, 1.0])
    three = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]])
    found = spherical_kmeans(three[:2], 1, generator=generator(), weights=weights[:2])
    np.testing.assert_allclose(found.centroids[0].numpy(), np.array([3, 1]) / 10**0.5, rtol=1e-6)


@pytest.mark.parametrize("weights", [None, torch.tensor([2.0, 0.0])])
def test_fewer_rows_than_centres_come_back_themselves(weights):
    points = torch.tensor([[3.0, 4.0], [0.0, 2.0]])
    found = spherical_kmeans(points, 5, generator=generator(), weights=weights)
    assert found.centroids.shape == (5, 2)
    assert found.counts.sum().item() == 2
    torch.testing.assert_close(found.centroids[0], torch.tensor([0.6, 0.8]))
