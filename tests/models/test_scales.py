"""One backbone at several sizes of an image, and what patch features make of them."""

import pytest
import torch
from helpers.tiny_pyramid import TinyPyramid
from torch import nn
from torch.nn import functional as F

from lit_fedad.core.errors import UserError
from lit_fedad.models.scales import ScaledPyramid, at_scales
from lit_fedad.models.tiles import TiledPyramid


class Edges(nn.Module):
    """Two layers of what a square holds, not linear: an image and its half differ."""

    channels, strides, fingerprint, provenance = (3, 3), (4, 8), "edges", {"name": "edges"}
    mean, std = (0.5, 0.5, 0.5), (0.2, 0.2, 0.2)

    def forward(self, images):
        return [F.max_pool2d(images, 4), F.max_pool2d(images, 8)]


def on_grid(layer):
    pooled = F.avg_pool2d(layer, 3, stride=1, padding=1)
    return F.interpolate(pooled, size=(8, 8), mode="bilinear", align_corners=False)


def test_averaged_features_are_means_over_the_sizes_and_all_others_those_of_the_whole_image(make_task):
    images = torch.rand(2, 3, 64, 64)
    given = {"backbone": Edges(), "grid": 8, "image_size": 64, "average_pool": "last"}
    task, whole = make_task(**given, scales=2), make_task(**given)
    halves = images.unflatten(2, (32, 2)).unflatten(4, (32, 2)).mean((3, 5))
    expected = torch.cat(
        [(on_grid(F.max_pool2d(images, side)) + on_grid(F.max_pool2d(halves, side))) / 2 for side in (4, 8)],
        dim=1,
    )
    averaged = task.embed({"image": images}, average_pool=True)
    torch.testing.assert_close(averaged, expected.flatten(2).transpose(1, 2))
    assert torch.equal(task.embed({"image": images}), whole.embed({"image": images}))  # maps stay sharp


def test_the_number_of_sizes_may_change_and_cached_features_know_it():
    three = at_scales(at_scales(Edges(), 2, (256, 256)), 3, (256, 256))
    layers = three(torch.rand(1, 3, 64, 64))
    assert [layer.shape[-1] for layer in layers] == [16, 8, 8, 4, 4, 2]
    assert at_scales(three, 1, (256, 256)) is three.backbone
    assert len({"edges", three.fingerprint, ScaledPyramid(Edges(), 2).fingerprint}) == 3


def test_unasked_large_images_that_are_seen_whole_have_two_sizes():
    def unasked(backbone, size):
        return getattr(at_scales(backbone, None, size), "scales", 1)

    transformer = Edges()
    transformer.strides = (14, 14)
    assert unasked(Edges(), (256, 512)) == 2
    assert unasked(Edges(), (128, 512)) == 1
    assert unasked(TiledPyramid(Edges(), (256, 512), 256), (256, 512)) == 1
    assert unasked(transformer, (280, 280)) == 1
    assert unasked(TinyPyramid(), (256, 256)) == 1  # says no strides


def test_sizes_that_cannot_be_are_refused(make_task):
    with pytest.raises(UserError, match=r"task.scales=2: an image in tiles is seen in one size"):
        at_scales(TiledPyramid(Edges(), (64, 64), 32), 2, (64, 64))
    for scales in (0, 3):
        with pytest.raises(UserError, match=rf"task.scales={scales}: .* 32 pixels .*\(images of 64 x 96\)"):
            make_task(backbone=Edges(), image_size=(64, 96), scales=scales)
