"""Encoders and decoders of small images: sizes, and the passes by hand and by torchvision."""

import pytest
import torch
import torchvision
from torch import nn
from torch.nn import functional as F

from lit_fedad.core.errors import UserError
from lit_fedad.models.convnets import BatchNorm, ConvNet, Decoder, ResNetCifar


def make(seed: int = 0) -> BatchNorm:
    torch.manual_seed(seed)
    norm = BatchNorm(3)
    norm.running_mean.normal_()
    norm.running_var.uniform_(0.5, 2)
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)
    return norm


def affine(norm: BatchNorm, normalised: torch.Tensor) -> torch.Tensor:
    return normalised * norm.weight.view(-1, 1, 1) + norm.bias.view(-1, 1, 1)


def test_a_lone_image_is_normalised_over_its_positions_and_leaves_no_trace():
    norm, image = make(), torch.randn(1, 3, 4, 4)
    before = {name: value.clone() for name, value in norm.state_dict().items()}
    centred = image - image.mean((2, 3), keepdim=True)
    expected = affine(norm, centred / (centred.square().mean((2, 3), keepdim=True) + norm.eps).sqrt())
    torch.testing.assert_close(norm(image), expected)
    assert all(torch.equal(value, before[name]) for name, value in norm.state_dict().items())


def test_a_lone_point_is_normalised_by_the_running_statistics():
    norm, image = make(), torch.randn(1, 3, 1, 1)
    mean, var = norm.running_mean.view(3, 1, 1), norm.running_var.view(3, 1, 1)
    torch.testing.assert_close(norm(image), affine(norm, (image - mean) / (var + norm.eps).sqrt()))


def test_several_images_are_torchs_business():
    norm, reference, images = make(), nn.BatchNorm2d(3), torch.randn(2, 3, 4, 4)
    reference.load_state_dict(norm.state_dict())
    for training in (True, False):
        norm.train(training)
        reference.train(training)
        assert torch.equal(norm(images), reference(images))
        assert torch.equal(norm.running_mean, reference.running_mean)


@pytest.mark.parametrize("norm", ["batch", "instance"])
def test_parameters_with_a_linear_head(norm):
    encoder = ConvNet(image_size=28, norm=norm)
    head = nn.Linear(encoder.num_features, 9)
    assert sum(p.numel() for module in (encoder, head) for p in module.parameters()) == 317_961


def test_the_convnet_takes_grey_images():
    encoder = ConvNet(image_size=28, inputs=1)
    assert sum(p.numel() for p in ConvNet(28).parameters()) - 2 * 9 * 128 == sum(
        p.numel() for p in encoder.parameters()
    )
    assert encoder(torch.randn(2, 1, 28, 28)).shape == (2, 2048)


@pytest.mark.parametrize(("size", "width"), [(28, 2048), (32, 2048), (16, 512), (64, 8192)])
def test_width_of_the_convnet(size, width):
    encoder = ConvNet(size)
    assert encoder.num_features == width
    assert encoder(torch.randn(2, 3, size, size)).shape == (2, width)


@pytest.mark.parametrize("norm", ["batch", "instance"])
def test_forward_pass_of_the_convnet(norm):
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


@pytest.mark.parametrize(("depth", "parameters"), [(18, 11_168_832), (34, 21_276_992)])
def test_parameters_of_resnets(depth, parameters):
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
def test_resnets_take_grey_images(stem, side):
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
