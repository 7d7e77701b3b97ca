"""Large images: features joined from tiles against those of whole images, and of several sizes."""

import pytest
import torch
from helpers.tiny_pyramid import TinyPyramid
from torch import nn
from torch.nn import functional as F

from lit_fedad.core.errors import UserError
from lit_fedad.models.backbones import create_backbone
from lit_fedad.models.large_images import ScaledPyramid, TiledPyramid, at_scales


class Local(nn.Module):
    """Two layers of means over squares: a position sees nothing beyond itself, so tiles must not show at all."""

    channels, strides, fingerprint, provenance = (3, 3), (4, 8), "local", {"name": "local"}
    mean, std = (0.5, 0.5, 0.5), (0.2, 0.2, 0.2)

    def forward(self, images):
        assert not images.requires_grad
        return [F.avg_pool2d(images, 4), F.avg_pool2d(images, 8)]


class Numbered(Local):
    """Gives the number of the tile as every feature, and keeps the sizes of the batches that it sees."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def forward(self, images):
        start = sum(self.calls)
        self.calls.append(len(images))
        number = (start + torch.arange(len(images), dtype=torch.float32)).view(-1, 1, 1, 1)
        return [number.expand_as(layer) for layer in super().forward(images)]


@pytest.mark.parametrize(
    ("size", "tile", "overlap"),
    [((64, 64), 64, None), ((96, 200), 32, 8), ((40, 72), 32, 24), ((64, 128), 32, 0), ((72, 40), 40, None)],
)
def test_features_of_one_place_are_those_of_the_whole_image(size, tile, overlap):
    images = torch.randn(2, 3, *size)
    for found, expected in zip(
        TiledPyramid(Local(), size, tile, overlap)(images), Local()(images), strict=True
    ):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_one_tile_passes_unchanged():
    images = torch.randn(2, 3, 64, 64)
    backbone = create_backbone("resnet10t", weights="own")
    tiled = TiledPyramid(backbone, (64, 64), 64)
    for image in range(2):
        single = images[image : image + 1]
        for found, expected in zip(tiled(single), backbone(single), strict=True):
            assert torch.equal(found, expected)


def test_in_the_overlap_one_tile_fades_into_the_next():
    # Tiles 0 and 1 of 32 pixels share 16, four positions of the first layer.
    first, second = TiledPyramid(Numbered(), (32, 48), 32, 16)(torch.zeros(1, 3, 32, 48))
    ramp = [0, 0, 0, 0, 1 / 8, 3 / 8, 5 / 8, 7 / 8, 1, 1, 1, 1]
    torch.testing.assert_close(first[0, 0], torch.tensor(ramp).expand(8, -1))
    torch.testing.assert_close(second[0, 0, 0], torch.tensor([0, 0, 1 / 4, 3 / 4, 1, 1]))


@pytest.mark.parametrize("at_once", [1, 3, 100])
def test_the_backbone_sees_a_bounded_number_of_tiles(at_once):
    backbone = Numbered()
    tiled = TiledPyramid(backbone, (64, 96), 32, 8)
    tiled.at_once = at_once
    tiled(torch.zeros(2, 3, 64, 96))
    assert tiled.count == 3 * 4
    assert sum(backbone.calls) == 2 * tiled.count
    assert max(backbone.calls) == min(at_once, tiled.count)


def test_the_batch_of_tiles_changes_nothing():
    backbone, images = create_backbone("resnet10t", weights="own"), torch.randn(2, 3, 96, 160)
    tiled, several = TiledPyramid(backbone, (96, 160), 64, 16), []
    for tiled.at_once in (1, 4, 100):
        several.append(tiled(images))
    for layers in zip(*several, strict=True):
        for other in layers[1:]:
            torch.testing.assert_close(other, layers[0], rtol=1e-5, atol=1e-5)


def test_cached_features_know_the_tiles():
    made = [
        TiledPyramid(Local(), (64, 64), tile, overlap).fingerprint
        for tile, overlap in [(32, 8), (32, 16), (64, 8)]
    ]
    assert len({Local.fingerprint, *made}) == 4
    assert TiledPyramid(Local(), (64, 64), 32).fingerprint == made[0]  # a quarter of the tile


@pytest.mark.parametrize(
    ("size", "tile", "overlap", "message"),
    [
        ((64, 96), 72, 8, "image.tile=72 is larger than the image, 64 x 96 pixels"),
        ((64, 96), 32, 32, "image.overlap=32 must be smaller than image.tile=32"),
        ((64, 96), 36, 8, "image.tile=36: .* largest stride, 8, must divide .* give 32 or 40"),
        ((64, 96), 32, 4, "image.overlap=4: .* give 8"),
        ((64, 100), 32, 8, "image.size=100: .* give 96 or 104"),
    ],
)
def test_what_cannot_be_cut_is_refused(size, tile, overlap, message):
    with pytest.raises(UserError, match=message):
        TiledPyramid(Local(), size, tile, overlap)


class Edges(Local):
    """Two layers of what a square holds, not linear: an image and its half differ."""

    fingerprint = "edges"

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
