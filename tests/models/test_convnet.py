"""FedVCK's ConvNet: sizes that its paper's traffic table fixes, and the forward pass by hand."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lit_fedad.models.convnets import ConvNet


@pytest.mark.parametrize("norm", ["batch", "instance"])
def test_parameters_with_a_linear_head(norm):
    encoder = ConvNet(image_size=28, norm=norm)
    head = nn.Linear(encoder.num_features, 9)
    assert sum(p.numel() for module in (encoder, head) for p in module.parameters()) == 317_961


def test_grey_images():
    encoder = ConvNet(image_size=28, inputs=1)
    assert sum(p.numel() for p in ConvNet(28).parameters()) - 2 * 9 * 128 == sum(
        p.numel() for p in encoder.parameters()
    )
    assert encoder(torch.randn(2, 1, 28, 28)).shape == (2, 2048)


@pytest.mark.parametrize(("size", "width"), [(28, 2048), (32, 2048), (16, 512), (64, 8192)])
def test_width(size, width):
    encoder = ConvNet(size)
    assert encoder.num_features == width
    assert encoder(torch.randn(2, 3, size, size)).shape == (2, width)


@pytest.mark.parametrize("norm", ["batch", "instance"])
def test_forward_pass(norm):
    encoder = ConvNet(image_size=28, norm=norm, channels=8)
    images = torch.randn(3, 3, 28, 28)
    maps = images
    over = (0, 2, 3) if norm == "batch" else (2, 3)
    convolutions = [layer for layer in encoder if isinstance(layer, nn.Conv2d)]
    for convolution, padding in zip(convolutions, (3, 1, 1), strict=True):
        maps = F.conv2d(maps, convolution.weight, convolution.bias, padding=padding)
        centred = maps - maps.mean(over, keepdim=True)
        maps = F.relu(centred / (centred.square().mean(over, keepdim=True) + 1e-5).sqrt())
        maps = F.avg_pool2d(maps, 2)
    torch.testing.assert_close(encoder(images), maps.flatten(1), rtol=1e-4, atol=1e-5)
