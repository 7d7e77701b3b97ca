"""The decoder: sizes, range, residual blocks."""

import pytest
import torch
from torch.nn import functional as F

from lit_fedad.core.errors import UserError
from lit_fedad.models.convnets import Decoder


@pytest.mark.parametrize(
    ("size", "side", "blocks"),
    [(4, 4, 0), (28, 7, 2), (32, 4, 3), (64, 4, 4), (96, 6, 4), (128, 4, 5), (224, 7, 5)],
)
def test_decodes_to_images(size, side, blocks):
    decoder = Decoder(latent=8, image_size=size, channels=32)
    images = decoder(torch.randn(2, 8))
    assert images.shape == (2, 3, size, size)
    assert ((images > 0) & (images < 1)).all()
    assert decoder[1].unflattened_size == (32, side, side)
    assert sum(isinstance(layer, torch.nn.Upsample) for layer in decoder) == blocks


@pytest.mark.parametrize("size", [3, 9, 100, 225])
def test_other_sizes_are_refused(size):
    with pytest.raises(UserError, match=f"image.size={size}"):
        Decoder(8, size)


def test_a_block_adds_two_convolutions_to_the_enlarged_map():
    torch.manual_seed(0)
    decoder = Decoder(latent=8, image_size=8, channels=64).eval()
    block, maps = decoder[3], torch.randn(2, 64, 4, 4)
    large = maps.repeat_interleave(2, dim=2).repeat_interleave(2, dim=3)
    scale = (1 + 1e-5) ** -0.5  # batch norm before any training
    inner = F.relu(F.conv2d(large, block.conv1.weight, padding=1) * scale)
    inner = F.conv2d(inner, block.conv2.weight, padding=1) * scale
    expected = F.relu(inner + F.conv2d(large, block.downsample[0].weight) * scale)
    assert expected.shape == (2, 32, 8, 8)
    torch.testing.assert_close(block(decoder[2](maps)), expected)


def test_every_parameter_learns():
    decoder = Decoder(latent=8, image_size=16, channels=32)
    decoder(torch.randn(2, 8)).square().mean().backward()
    assert all(parameter.grad.any() for parameter in decoder.parameters())
