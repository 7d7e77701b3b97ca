"""CReFF as a whole: weights equal to FedAvg's, predictions, messages, and refused settings."""

import pytest
import torch
from helpers.creff import QUICK, WIDTH, K, make
from safetensors.torch import save

from lit_fedad.contracts import Context
from lit_fedad.methods.creff import (
    BIAS,
    CLASSES,
    GRADIENTS,
    WEIGHT,
    CReFFClient,
    CReFFServer,
)
from lit_fedad.methods.fedavg import FedAvgClient


@pytest.mark.parametrize("fraction", [1.0, 0.5])
def test_weights_are_fedavgs_number_for_number(federate, creff, data, exactly, fraction):
    settings = {"data": data, "shuffle": True, "fraction": fraction, "client": {"local_epochs": 2}}
    ours, theirs = creff(**settings), federate(FedAvgClient, task=make(), **settings)
    exactly(ours.server.weights, theirs.server.weights)
    assert [r.per_client for r in ours.history] == [r.per_client for r in theirs.history]
    # The classifier that predicts is another one.
    assert not torch.allclose(ours.server.auxiliary[WEIGHT], ours.server.weights["classifier.weight"])


def test_the_federated_base_predicts_with_the_retrained_classifier(creff, exactly):
    played = creff()
    head = {
        "classifier.weight": played.server.auxiliary[WEIGHT],
        "classifier.bias": played.server.auxiliary[BIAS],
    }
    expected = {**played.server.weights, **head}
    exactly(played.history[-1].metrics, dict.fromkeys((0, 1, 2), expected))
    client = played.client
    assert client.predictors.shared
    assert not client.predictors.own
    broadcast = played.server.broadcast(0)
    client.receive(broadcast)
    exactly(client.shared_state(), played.server.weights)
    client.deploy("server")
    exactly(client.shared_state(), expected)
    client.receive(broadcast)
    exactly(client.shared_state(), played.server.weights)


def test_before_the_first_round_the_initial_classifier_predicts(exactly):
    client = CReFFClient(make())
    server = CReFFServer(client, **QUICK)
    for part in (client, server):
        part.context = Context(0, 1)
    initial = client.shared_state()
    client.receive(server.broadcast(0))
    client.deploy()
    exactly(client.shared_state(), initial)


def test_what_crosses(creff, tap):
    """Up: the weights, |C_k| z (d + 1) floats, and as many class numbers. Down: weights and a classifier."""
    played = creff(channel=tap)
    for report in played.history:
        for client, held in {0: 3, 1: 1, 2: 2}.items():
            extra = {
                GRADIENTS: torch.zeros(held, K, WIDTH + 1),
                CLASSES: torch.zeros(held, dtype=torch.int64),
            }
            assert report.bytes_up[client] == len(save({**played.server.weights, **extra}))
            assert report.bytes_down[client] == len(
                save({**played.server.weights, WEIGHT: torch.zeros(K, WIDTH), BIAS: torch.zeros(K)})
            )
    assert tap.names == {*played.server.weights, GRADIENTS, CLASSES, WEIGHT, BIAS}
