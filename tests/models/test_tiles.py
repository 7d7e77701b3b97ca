"""Features joined from tiles against those of whole images, and what cannot be cut."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lit_fedad.core.errors import UserError
from lit_fedad.models.backbones import create_backbone
from lit_fedad.models.tiles import TiledPyramid


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


def test_shares_of_a_position_add_up_to_one():
    class Ones(Local):
        def forward(self, images):
            return [torch.ones_like(layer) for layer in super().forward(images)]

    for layer in TiledPyramid(Ones(), (120, 88), 32, 24)(torch.zeros(1, 3, 120, 88)):
        torch.testing.assert_close(layer, torch.ones_like(layer))


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
