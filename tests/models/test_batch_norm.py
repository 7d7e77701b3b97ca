"""Batch norm of one image; of several it is torch's."""

import torch
from torch import nn

from lit_fedad.models.convnets import BatchNorm


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
