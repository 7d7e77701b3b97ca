"""Encoders that train on pixels: themselves, or with batch normalisation that stays."""

import torch
from torch import nn

from lit_fedad.models.convnets import ResNetCifar
from lit_fedad.models.encoders import trained_encoder


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
