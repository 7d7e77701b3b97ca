"""Gradients under a scaled loss, as 16-mixed has it: what methods do with them before a step."""

from typing import ClassVar

import numpy as np
import pytest
import torch
from helpers.scaled import scaled_fabric
from torch.utils.data import DataLoader

from lit_fedad.contracts.state import state_of
from lit_fedad.methods.apfl import APFLClient
from lit_fedad.methods.apple import AppleClient, AppleServer
from lit_fedad.methods.fedavg import FedAvgClient, FedAvgServer
from lit_fedad.methods.fednova import FedNovaClient, FedNovaServer
from lit_fedad.methods.pfedme import PFedMeClient
from lit_fedad.methods.scaffold import CONTROL, ScaffoldClient, ScaffoldServer

METHODS = {
    "fedavg": (FedAvgClient, FedAvgServer, {}),
    "scaffold": (ScaffoldClient, ScaffoldServer, {"learning_rate": 0.05}),
    "apfl": (APFLClient, FedAvgServer, {"alpha": 0.4}),
    "apple": (AppleClient, AppleServer, {"rounds": 3, "relation_learning_rate": 0.05}),
    "fednova": (FedNovaClient, FedNovaServer, {}),
    "pfedme": (PFedMeClient, FedAvgServer, {"inner_steps": 2}),
}


@pytest.mark.parametrize("method", METHODS)
def test_a_scaled_loss_changes_nothing(federate, make_linear, points_by_hand, exactly, method):
    """The scale is a power of two, which rounds nothing: equal bit for bit."""
    client_class, server_class, client = METHODS[method]
    parts = {"data": points_by_hand, "client": client}
    plain = federate(client_class, server_class, task=make_linear(), **parts)
    scaled = federate(client_class, server_class, task=make_linear(), **parts, fabric=scaled_fabric())
    exactly(state_of(scaled.server), state_of(plain.server))
    for number in points_by_hand:
        assert scaled.pool.get(number)["loss_scale"]["scale"] == 2.0**16
        exactly(scaled.pool.get(number) | {"loss_scale": None}, plain.pool.get(number))


def test_a_step_left_out_for_overflow_is_no_step_of_scaffold(federate, make_linear):
    """The first batch overflows and is left out: the control is the gradient of the second alone.

    With f = W x + b - y = (0.125 + 0.5 - 3, -0.5 + 0.25 - 1) at x = (1, 0), the gradient is f (x, 1)^T.
    """
    points = [
        {"x": torch.tensor([1e6, 0.0]), "y": torch.zeros(2)},
        {"x": torch.tensor([1.0, 0.0]), "y": torch.tensor([3.0, 1.0])},
    ]
    played = federate(
        ScaffoldClient,
        ScaffoldServer,
        task=make_linear(dtype=torch.float32),
        data={0: DataLoader(points)},
        rounds=1,
        client={"learning_rate": 0.25},
        fabric=scaled_fabric(scale=2.0**100, backoff=2.0**-96),
    )
    control = {name.removeprefix(CONTROL): entry for name, entry in played.server.auxiliary.items()}
    np.testing.assert_allclose(control["layer.weight"], [[-2.375, 0], [-1.25, 0]], rtol=1e-5)
    np.testing.assert_allclose(control["layer.bias"], [-2.375, -1.25], rtol=1e-5)
    moved = 0.125 + 0.25 * 2.375
    np.testing.assert_allclose(played.server.weights["layer.bias"][0], moved, rtol=1e-5)
    assert not any(name.startswith(CONTROL) for name in played.server.weights)


@pytest.mark.parametrize("method", ["apfl", "apple"])
def test_overflow_leaves_learnt_mixtures_alone(federate, make_linear, method):
    client_class, server_class, client = METHODS[method]
    point = {"x": torch.tensor([1e6, 0.0]), "y": torch.zeros(2)}
    played = federate(
        client_class,
        server_class,
        task=make_linear(dtype=torch.float32),
        data={0: DataLoader([point]), 1: DataLoader([point])},
        rounds=1,
        client=client,
        fabric=scaled_fabric(scale=2.0**120),
    )
    learnt = played.pool.get(0)["alpha" if method == "apfl" else "relations"]
    np.testing.assert_allclose(learnt, 0.4 if method == "apfl" else [0.5, 0.5])


def test_a_run_that_was_cut_off_goes_on_with_each_clients_own_scale(federate, make_linear, exactly):
    """Client 0 overflows until its scale is halved twice, in rounds 1 and 2; client 1 has gradients of zero."""
    large = {"x": torch.tensor([1.0, 0.0]), "y": torch.tensor([3.0, 1.0])}
    at_rest = {"x": torch.tensor([0.0, 0.0]), "y": torch.tensor([0.5, 0.25])}
    data = {0: DataLoader([large]), 1: DataLoader([at_rest])}

    def play(rounds, folder=None):
        task, fabric = make_linear(dtype=torch.float32), scaled_fabric(scale=2.0**127)
        parts = {"task": task, "data": data, "fabric": fabric}
        played = federate(FedAvgClient, FedAvgServer, **parts, rounds=rounds, folder=folder)
        assert fabric.strategy.precision.scaler.get_scale() == 2.0**127
        return played

    whole = play(5)
    scales = [whole.pool.get(number)["loss_scale"]["scale"] for number in (0, 1)]
    assert scales[0] < scales[1] == 2.0**127
    play(1, "cut")
    gone_on = play(5, "cut")
    exactly(state_of(gone_on.server), state_of(whole.server))
    for number in (0, 1):
        exactly(gone_on.pool.get(number), whole.pool.get(number))


class Doubling(FedAvgServer):
    """Ends every merge with another scale than it began with."""

    began: ClassVar[list[float]] = []

    merges_sums = False

    def aggregate(self, updates):
        scaler = self.fabric.strategy.precision.scaler
        self.began.append(scaler.get_scale())
        scaler.scale(torch.ones(()))
        scaler.update(2 * scaler.get_scale())
        super().aggregate(updates)


def test_a_server_begins_every_merge_with_the_first_scale(federate, make_linear, points_by_hand):
    federate(
        FedAvgClient,
        Doubling,
        task=make_linear(),
        data=points_by_hand,
        fabric=scaled_fabric(scale=8.0),
        rounds=3,
    )
    assert Doubling.began == [8.0, 8.0, 8.0]
