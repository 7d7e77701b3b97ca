"""Patch grids of oblong images and of tiles."""

import pytest
import torch
from torch.nn import functional as F

from lit_fedad.core.errors import UserError
from lit_fedad.memory.reduce import PositionReduce


@pytest.mark.parametrize(
    ("size", "tile", "grid"),
    [(32, None, (4, 4)), ((32, 64), None, (4, 8)), ((72, 32), None, (9, 4)), ((32, 64), 16, (8, 16))],
)
def test_patches_are_square_whatever_the_shape_of_the_image(make_task, size, tile, grid):
    task = make_task(image_size=size, tile=tile)
    assert task.grid == grid
    assert task.vectors_per_image == grid[0] * grid[1]
    assert task.slots == 16  # grid * grid, of what the backbone sees at once


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"image_size": (32, 64)}, "an image has 32 patches; give task.slots=32"),
        ({"subspace": 0.5}, "leave task.subspace out"),
    ],
)
def test_a_mean_by_position_that_does_not_fit_the_task_is_refused_before_any_exchange(
    make_task, settings, told
):
    with pytest.raises(UserError, match=told):
        make_task(reduce=PositionReduce(), **settings)


def test_features_and_places_go_row_by_row(make_task):
    task = make_task(image_size=(32, 64))
    images = torch.randn(2, 3, 32, 64)
    features = task.embed({"image": images}).view(2, 4, 8, 8)
    torch.testing.assert_close(features[..., :3], F.avg_pool2d(images, 8).permute(0, 2, 3, 1))
    places = task.places.view(4, 8, 2)
    assert places[0, :, 0].tolist() == [-7 / 8, -5 / 8, -3 / 8, -1 / 8, 1 / 8, 3 / 8, 5 / 8, 7 / 8]
    assert places[:, 0, 1].tolist() == [-3 / 4, -1 / 4, 1 / 4, 3 / 4]


def test_maps_have_the_shape_of_the_image_and_scores_leave_out_its_rim(make_task):
    task = make_task(image_size=(32, 64), rim=1, sigma=1)
    scores = torch.zeros(2, 4, 8)
    scores[0, 1, 6], scores[1, 1, 7] = 1, 1
    maps = task.draw(scores.flatten())
    assert maps.shape == (2, 32, 64)
    assert divmod(int(maps[0].argmax()), 64)[0] // 8 == 1
    assert divmod(int(maps[0].argmax()), 64)[1] // 8 == 6
    judged = task.judge(scores.flatten())
    assert judged[0] == maps[0].max()
    assert judged[1] == 0


def test_an_image_whose_scores_are_all_negative_is_not_judged_by_its_rim(make_task):
    """A constant that is added to the scores of all patches is added to the image's."""
    task = make_task(image_size=(32, 64), rim=1, sigma=1)
    scores = torch.zeros(2, 4, 8)
    scores[:, 0], scores[0, 2, 3], scores[1, 2, 3] = 9, 1, 0.5
    torch.testing.assert_close(task.judge(scores.flatten() - 5), task.judge(scores.flatten()) - 5)


@pytest.mark.parametrize("top", [0.0, 0.1, 1.0])
def test_image_scores_are_means_of_the_share_of_highest_pixels_of_their_maps(make_task, top):
    task, scores = make_task(top=top, sigma=1, rim=0), torch.rand(3 * 16)
    pixels = task.draw(scores).flatten(1).sort(dim=1, descending=True).values
    expected = pixels[:, : max(1, round(top * 32 * 32))].mean(1)
    torch.testing.assert_close(task.judge(scores), expected)


@pytest.mark.parametrize(
    ("size", "grid", "tile", "pixels"), [(32, 4, None, 2), (64, 8, None, 8), (64, 4, 32, 2)]
)
def test_image_scores_are_smoothed_the_more_the_finer_the_grid(make_task, size, grid, tile, pixels):
    given = {"image_size": size, "grid": grid, "tile": tile, "rim": 1, "top": 0.1}
    scores = torch.rand(2 * (size // 8) ** 2)
    judged = make_task(**given, sigma=1, image_sigma=0.25).judge(scores)
    torch.testing.assert_close(judged, make_task(**given, sigma=pixels).judge(scores))
    assert not torch.allclose(judged, make_task(**given, sigma=1).judge(scores))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"image_size": (32, 64), "rim": 2}, "task.rim=2 leaves nothing of a grid of 4"),
        ({"image_size": (32, 0)}, "task.image_size=.* of at least 1"),
        ({"image_size": 2048, "tile": 8, "grid": 8}, "task.grid=8: .* 2048 x 2048 patches"),
        ({"sigma": 1e30}, r"task.sigma=1e\+30 must be in \[0, 8192\]"),
        ({"average_pool": "first"}, "task.average_pool=first must be true, false or 'last'"),
        ({"image_sigma": 2.0}, r"task.image_sigma=2.0 must be in \[0, 1\]"),
    ],
)
def test_grids_and_blurs_that_cannot_be_are_refused(make_task, given, message):
    with pytest.raises(UserError, match=message):
        make_task(**given)
