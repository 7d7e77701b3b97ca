"""The encoders against torchvision's ResNets."""

import pytest
import torch
import torchvision

from lit_fedad.models.convnets import ResNetCifar


@pytest.mark.parametrize(("depth", "parameters"), [(18, 11_168_832), (34, 21_276_992)])
def test_parameters(depth, parameters):
    encoder = ResNetCifar(depth)
    assert sum(p.numel() for p in encoder.parameters() if p.requires_grad) == parameters
    reference = getattr(torchvision.models, f"resnet{depth}")()
    whole = sum(p.numel() for p in reference.parameters())
    # Without the classifier, and with a stem of 3x3 instead of 7x7.
    assert parameters == whole - (512 * 1000 + 1000) - 64 * 3 * (7**2 - 3**2)


@pytest.mark.parametrize(
    ("stem", "size", "side"), [("cifar", 32, 4), ("imagenet", 64, 2), ("imagenet", 32, 1)]
)
def test_features_are_the_mean_of_the_last_map(stem, size, side):
    encoder = ResNetCifar(18, stem)
    maps = []
    encoder.layer4.register_forward_hook(lambda module, inputs, output: maps.append(output))
    features = encoder(torch.randn(2, 3, size, size))
    assert maps[0].shape == (2, 512, side, side)
    torch.testing.assert_close(features, maps[0].mean((2, 3)))
    assert features.shape == (2, encoder.num_features)


def test_with_the_original_stem_it_is_torchvisions():
    encoder, reference = ResNetCifar(18, "imagenet"), torchvision.models.resnet18()
    reference.fc = torch.nn.Identity()
    reference.load_state_dict(encoder.state_dict())
    images = torch.randn(2, 3, 64, 64)
    # Channels last add up in another order.
    torch.testing.assert_close(encoder.eval()(images), reference.eval()(images), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("stem", "side"), [("cifar", 3), ("imagenet", 7)])
def test_grey_images(stem, side):
    colour, grey = ResNetCifar(18, stem), ResNetCifar(18, stem, inputs=1)
    sizes = [sum(p.numel() for p in encoder.parameters()) for encoder in (colour, grey)]
    assert sizes[0] - sizes[1] == 2 * side**2 * 64
    assert grey(torch.randn(2, 1, 64, 64)).shape == (2, 512)


def test_one_image_trains_and_leaves_running_statistics_alone():
    encoder = ResNetCifar(18)
    encoder(torch.randn(1, 3, 32, 32)).sum().backward()
    assert encoder.conv1.weight.grad.isfinite().all()
    assert not any(buffer.any() for name, buffer in encoder.named_buffers() if name.endswith("running_mean"))


@pytest.mark.parametrize(("channels", "last"), [(4, False), (8, False), (16, True)])
def test_narrow_networks_keep_to_the_memory_format_that_works(channels, last):
    """oneDNN's backward pass of a narrow 1x1 convolution of stride 2 writes out of bounds in channels last."""
    seen = []
    network = ResNetCifar(18, channels=channels)
    network.conv1.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    network(torch.rand(2, 3, 8, 8))
    assert seen[0].is_contiguous(memory_format=torch.channels_last) == last
