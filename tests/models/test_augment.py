"""Shifts and mirrors against all that can be cut out of a padded image."""

import torch
from torch.nn import functional as F

from lit_fedad.tasks.classifier import crop_and_flip


def all_views(image: torch.Tensor, padding: int) -> dict[tuple[int, int, bool], torch.Tensor]:
    """Every view of an image [C, H, W], by row and column offset and whether it is mirrored."""
    _, height, width = image.shape
    padded = F.pad(image, [padding] * 4)
    views = {}
    for top in range(2 * padding + 1):
        for left in range(2 * padding + 1):
            crop = padded[:, top : top + height, left : left + width]
            views[top, left, False], views[top, left, True] = crop, crop.flip(2)
    return views


def test_each_image_becomes_one_of_its_own_views_and_all_views_occur():
    torch.manual_seed(0)
    images = torch.rand(2, 3, 4, 5).repeat_interleave(300, dim=0)  # two images, 300 times each
    seen = [set(), set()]
    possible = [all_views(images[0], 1), all_views(images[300], 1)]
    for number, view in enumerate(crop_and_flip(images, padding=1)):
        which = number // 300
        matches = [key for key, crop in possible[which].items() if torch.equal(crop, view)]
        assert len(matches) == 1
        seen[which].update(matches)
    assert [len(keys) for keys in seen] == [18, 18]


def test_draws_follow_the_global_generator():
    images = torch.rand(8, 3, 32, 32)
    views = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        views.append(crop_and_flip(images))
    assert torch.equal(views[0], views[1])
    assert not torch.equal(views[0], views[2])


def test_without_padding_it_only_mirrors():
    images = torch.rand(64, 3, 4, 4)
    views = crop_and_flip(images, padding=0)
    mirrored = [torch.equal(view, image.flip(2)) for view, image in zip(views, images, strict=True)]
    kept = [torch.equal(view, image) for view, image in zip(views, images, strict=True)]
    assert [a != b for a, b in zip(mirrored, kept, strict=True)] == [True] * 64
    assert any(mirrored)
    assert any(kept)
