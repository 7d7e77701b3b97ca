"""What a task trains: frozen features with a network on them, or an encoder of pixels."""

import pytest
import torch
from helpers.tiny_pyramid import TinyPyramid
from torch import nn
from torch.nn import functional as F

from lit_fedad.contracts.task import learned_state
from lit_fedad.core.errors import UserError
from lit_fedad.models.convnets import ResNetCifar
from lit_fedad.models.encoders import FrozenEncoder, trained_encoder
from lit_fedad.tasks.classifier import Classifier

MEAN, STD = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])


def encoder(**settings):
    torch.manual_seed(0)
    return FrozenEncoder(TinyPyramid(), **{"size": 32, "hidden": 5, **settings})


def pixels(number=3, side=32):
    return torch.rand(number, 3, side, side, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(("mean", "std"), [((0.5,) * 3, (0.5,) * 3), ((0.0,) * 3, (1.0,) * 3)])
def test_features_are_pooled_maps_of_images_as_the_backbone_expects_them(mean, std):
    found = encoder(mean=mean, std=std)
    images = (pixels() - torch.tensor(mean).view(-1, 1, 1)) / torch.tensor(std).view(-1, 1, 1)
    maps = found.backbone((pixels() - MEAN.view(-1, 1, 1)) / STD.view(-1, 1, 1))
    by_hand = F.normalize(torch.cat([layer.mean((2, 3)) for layer in maps], 1), dim=1)
    torch.testing.assert_close(found.features(images), by_hand, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("size", [(64, 32), (32, 64), (48, 48)])
def test_images_of_every_form_are_scaled_to_one_square(size):
    found, images = encoder(), torch.rand(2, 3, *size, generator=torch.Generator().manual_seed(3))
    seen = []
    found.backbone.register_forward_pre_hook(lambda _, inputs: seen.append(tuple(inputs[0].shape[2:])))
    found.features(images)
    assert seen == [(32, 32)]


def test_begins_as_the_frozen_features_and_learns_to_leave_them():
    found = encoder()
    frozen = found.features(pixels())
    torch.testing.assert_close(found(pixels()), found.length * frozen)
    optimizer = torch.optim.SGD([p for p in found.parameters() if p.requires_grad], 1.0)
    found(pixels()).square()[:, 0].sum().backward()
    optimizer.step()
    assert not torch.allclose(found(pixels()), found.length * frozen)
    torch.testing.assert_close(found.features(pixels()), frozen)


def test_the_mean_square_is_one_before_and_after_training():
    """At length 1 biases outweigh features, and what is trained on them hardly moves."""
    found, ones = encoder(), torch.ones(3)
    torch.testing.assert_close(found(pixels()).square().mean(1), ones)
    with torch.no_grad():
        found.network[2].weight.normal_()
    frozen = found.features(pixels()) * found.num_features**0.5
    torch.testing.assert_close(found(pixels()).square().mean(1), ones)
    moved = F.normalize(frozen + found.network(frozen), dim=1)
    torch.testing.assert_close(F.normalize(found(pixels()), dim=1), moved)


def test_kept_features_take_the_place_of_images():
    found = encoder()
    with torch.no_grad():
        found.network[2].weight.normal_()
    torch.testing.assert_close(found(found.features(pixels())), found(pixels()))


def test_grey_images_are_seen_in_three_equal_channels():
    grey = pixels()[:, :1]
    found = encoder(mean=[0.4], std=[0.2])
    torch.testing.assert_close(
        found.features((grey - 0.4) / 0.2), found.features((grey.expand(-1, 3, -1, -1) - 0.4) / 0.2)
    )


@pytest.mark.parametrize(("setting", "value"), [("size", 7), ("hidden", -1), ("views", 4)])
def test_numbers_out_of_range_are_refused(setting, value):
    with pytest.raises(UserError, match=f"features.{setting}={value} must be at least"):
        encoder(**{setting: value})


def test_no_network_trains_nothing():
    found = encoder(hidden=0)
    assert not [p for p in found.parameters() if p.requires_grad]
    torch.testing.assert_close(found(pixels()), found.length * found.features(pixels()))


def test_the_backbone_is_no_part_of_what_clients_share():
    task = Classifier(encoder(), classes=2)
    assert {name.split(".")[0] for name in learned_state(task)} == {"encoder", "classifier"}
    assert not [name for name in learned_state(task) if "backbone" in name]


def network():
    torch.manual_seed(0)
    return ResNetCifar(18, channels=4)


def step(encoder):
    """One step of training at a batch unlike the statistics that the network begins with."""
    encoder.train()
    optimizer = torch.optim.SGD([p for p in encoder.parameters() if p.requires_grad], 0.01)
    encoder(5 + torch.rand(4, 3, 16, 16)).square().mean().backward()
    optimizer.step()


def normalisation(encoder):
    return {
        name: entry.clone() for name, entry in encoder.state_dict().items() if ".bn" in name or "norm" in name
    }


def test_normalisation_stays_where_it_is_frozen_and_all_else_trains():
    encoder = trained_encoder(network(), freeze_normalisation=True)
    before, convolution = normalisation(encoder), next(encoder.parameters()).clone()
    step(encoder)
    after = normalisation(encoder)
    assert before
    assert all(torch.equal(entry, after[name]) for name, entry in before.items())
    assert not torch.equal(convolution, next(encoder.parameters()))


def test_otherwise_it_is_the_network_itself():
    trained = network()
    assert trained_encoder(trained) is trained
    before = normalisation(trained)
    step(trained)
    assert any(not torch.equal(entry, normalisation(trained)[name]) for name, entry in before.items())


def test_another_networks_weights_fit_and_give_its_predictions():
    source = network()
    step(source)
    encoder = trained_encoder(ResNetCifar(18, channels=4), freeze_normalisation=True)
    encoder.load_state_dict(source.state_dict())
    images = torch.rand(2, 3, 16, 16)
    torch.testing.assert_close(encoder.train()(images), source.eval()(images))
    assert not [module for module in encoder.modules() if isinstance(module, nn.BatchNorm2d)]


def test_features_are_scaled_to_one_length():
    network = nn.Linear(3, 4)
    network.num_features = 4
    found = trained_encoder(network, length=2.5)(torch.randn(5, 3))
    torch.testing.assert_close(found.norm(dim=1), torch.full((5,), 2.5))
    assert trained_encoder(network) is network
