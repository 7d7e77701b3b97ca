"""FedBN: normalisation layers, found by their type, stay at home."""

import pytest
import torch
from torch import nn

from lit_fedad.contracts import Task
from lit_fedad.contracts.task import learned_state
from lit_fedad.methods.fedavg import FedAvgClient
from lit_fedad.methods.fedbn import FedBNClient, FedBNServer, normalisation_keys
from lit_fedad.models.convnets import BatchNorm

NORM = {
    f"downsample.1.{name}"
    for name in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
}


@pytest.fixture
def fedbn(federate):
    def play(task, data, **settings):
        return federate(FedBNClient, FedBNServer, task=task, data=data, **settings)

    return play


def test_three_rounds_by_hand(fedbn, make_classifier, make_points):
    """Two models trained side by side; after each round all but the normalisation layer becomes their mean."""
    data = {0: make_points(6), 1: make_points(2, seed=1)}
    models = {client: make_classifier() for client in data}
    shared = set(learned_state(make_classifier())) - NORM
    for _ in range(3):
        for client, model in models.items():
            model.train()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            for batch in data[client]:
                optimizer.zero_grad()
                model.training_step(batch)["loss"].backward()
                optimizer.step()
        states = {client: model.state_dict() for client, model in models.items()}
        mean = {name: (0.75 * states[0][name].double() + 0.25 * states[1][name]).float() for name in shared}
        for model in models.values():
            model.load_state_dict(mean, strict=False)
    played = fedbn(make_classifier(), data)
    # Float32, averaged in double precision: the same to the bit.
    assert set(played.server.weights) == shared
    for client, model in models.items():
        predicts = played.history[-1].metrics[client]
        assert all(torch.equal(predicts[name], entry) for name, entry in model.state_dict().items())


@pytest.mark.parametrize(
    "layer",
    [
        nn.BatchNorm1d(4),
        BatchNorm(4),
        nn.SyncBatchNorm(4),
        nn.InstanceNorm2d(4, affine=True),
        nn.GroupNorm(2, 4),
        nn.LayerNorm(4),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_layers_are_found_by_type_whatever_their_name(layer):
    task = Task()
    task.downsample = nn.Sequential(nn.Linear(4, 4), nn.ModuleDict({"second": layer}))
    task.bn = nn.Linear(4, 4)
    assert normalisation_keys(task) == {f"downsample.1.second.{name}" for name in layer.state_dict()}
    assert normalisation_keys(task)


def test_normalisation_layers_never_cross(fedbn, make_classifier, make_points, tap):
    played = fedbn(make_classifier(), {0: make_points(6), 1: make_points(4, seed=1)}, channel=tap)
    assert tap.names == set(learned_state(make_classifier())) - NORM
    assert set(played.pool.get(0)["own_entries"]) == NORM


def test_without_normalisation_it_is_fedavg_bit_for_bit(federate, fedbn, make_task, make_loader, exactly):
    data = {0: make_loader(5), 1: make_loader(3, seed=1)}
    average = federate(FedAvgClient, task=make_task(), data=data, rounds=2)
    exactly(fedbn(make_task(), data, rounds=2).history[-1].metrics, average.history[-1].metrics)


def test_without_normalisation_it_says_so_once(fedbn, make_linear, make_points):
    history = fedbn(make_linear(), {0: make_points(4), 1: make_points(4, seed=1)}).history
    assert [report.warnings for report in history] == [
        ["Linear has no normalisation layer that trains: fedbn is fedavg here"],
        [],
        [],
    ]


def test_normalisation_in_a_frozen_backbone_is_none(fedbn, make_linear, make_points):
    task = make_linear()
    task.backbone = nn.BatchNorm1d(2).requires_grad_(False)
    assert len(fedbn(task, {0: make_points(4)}, rounds=1).history[0].warnings) == 1


def test_with_normalisation_it_says_nothing(fedbn, make_classifier, make_points):
    history = fedbn(make_classifier(), {0: make_points(4)}).history
    assert not any(report.warnings for report in history)
