"""Server optimisers, by hand: clients of 10 and 30 images send 1 and 5, so that the mean is 4 in every round."""

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from torch import nn

from lit_fedad.contracts import Context, Task, Update
from lit_fedad.contracts.state import load_state, state_of
from lit_fedad.core.building import build
from lit_fedad.core.errors import UserError
from lit_fedad.methods.fedavg import FedAvgClient, FedAvgServer
from lit_fedad.methods.feddyn import FedDynClient, FedDynServer
from lit_fedad.methods.parts.server_optimizers import Adaptive


class OneWeight(Task):
    num_features = 1

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.register_buffer("running", torch.zeros(1))


def message(value):
    return {"weight": torch.tensor([value]), "running": torch.tensor([value])}


def played(make, rounds=3):
    """Weights by round, with a new server in each, as after an interruption."""
    state, weights = None, []
    for number in range(1, rounds + 1):
        server = FedAvgServer(FedAvgClient(OneWeight()), make)
        if state:
            load_state(server, state)
        server.context = Context(seed=0, round=number)
        server.aggregate({0: Update(message(1.0), 10), 1: Update(message(5.0), 30)})
        state = state_of(server)
        weights.append(server.broadcast(0)["weight"].item())
        assert server.broadcast(0)["running"].item() == 4.0  # what does not train is averaged
    return weights


# FedAvgM with beta = 1/2: v = -4, -2, then -1/2 * 2 + (6 - 4) = 1.
@pytest.mark.parametrize(("momentum", "expected"), [(0.5, [4.0, 6.0, 5.0]), (0.0, [4.0, 4.0, 4.0])])
def test_fedavgm_is_sgd_with_momentum(momentum, expected):
    assert played(partial(torch.optim.SGD, lr=1.0, momentum=momentum)) == expected


def test_a_learning_rate_may_be_a_whole_number():
    """The authors' is 1, and torch's optimisers say of theirs that it is a number or a tensor."""
    section = {"_target_": "torch.optim.SGD", "_partial_": True, "lr": 1, "momentum": 0.5}
    assert played(build(section)) == [4.0, 6.0, 5.0]


@pytest.mark.parametrize(
    "setting", [{"lr": 0.0}, {"tau": 0.0}, {"tau": 2e9}, {"beta1": 1.0}, {"beta2": -0.1}]
)
def test_settings_out_of_range_are_refused(setting):
    ((name, value),) = setting.items()
    with pytest.raises(UserError, match=rf"^method\.server\.server_optimizer\.{name}={value} must be"):
        Adaptive(OneWeight().parameters(), **setting)


def test_a_momentum_of_one_is_refused():
    with pytest.raises(UserError, match=r"^method\.server\.server_optimizer\.momentum=1\.0 must be"):
        FedAvgServer(FedAvgClient(OneWeight()), partial(torch.optim.SGD, lr=1.0, momentum=1.0))


@pytest.mark.parametrize("method", ["fedavgm", "adam", "feddyn"])
def test_weights_that_no_client_changes_stay(method):
    """As those of a network whose last rounds train the output alone."""
    if method == "feddyn":
        server = FedDynServer(FedDynClient(OneWeight()))
    else:
        make = partial(torch.optim.SGD, lr=1.0, momentum=0.5) if method == "fedavgm" else Adaptive
        server = FedAvgServer(FedAvgClient(OneWeight()), make)
    server.register_clients({0: 10, 1: 30})
    server.aggregate({0: Update(message(1.0), 10), 1: Update(message(5.0), 30)})
    reached = server.broadcast(0)["weight"].item()
    back = {**message(2.0), "weight": server.broadcast(0)["weight"]}
    server.aggregate({0: Update(back, 10), 1: Update(back, 30)})
    assert server.broadcast(0)["weight"].item() == reached != 0.0
    assert server.broadcast(0)["running"].item() == 2.0


@pytest.mark.parametrize("rule", ["adagrad", "adam", "yogi"])
def test_adaptive_rules_by_independent_arithmetic(rule):
    eta, beta1, beta2, tau = 0.5, 0.8, 0.9, 0.1
    x, m, v, expected = 0.0, 0.0, tau**2, []
    for _ in range(3):
        change = 4.0 - x  # Delta of Alg. 2
        m = beta1 * m + (1 - beta1) * change
        square = change**2
        v = {
            "adagrad": v + square,
            "adam": beta2 * v + (1 - beta2) * square,
            "yogi": v - (1 - beta2) * square * np.sign(v - square),
        }[rule]
        x = x + eta * m / (np.sqrt(v) + tau)
        expected.append(x)
    found = played(partial(Adaptive, lr=eta, beta1=beta1, beta2=beta2, tau=tau, rule=rule))
    assert found == pytest.approx(expected, rel=1e-5)


def test_fedadagrad_has_no_momentum():
    """Reddi et al. run FedAdagrad with beta_1 = 0: ``x += eta Delta / (sqrt(tau^2 + sum Delta^2) + tau)``."""
    preset = yaml.safe_load((Path(__file__).parents[2] / "conf/method/fedadagrad.yaml").read_text())
    options = {k: v for k, v in preset["method"]["server"]["server_optimizer"].items() if k[0] != "_"}
    x, squares, expected = 0.0, options["tau"] ** 2, []
    for _ in range(3):
        squares += (4.0 - x) ** 2
        x += options["lr"] * (4.0 - x) / (squares**0.5 + options["tau"])
        expected.append(x)
    assert played(partial(Adaptive, **options)) == pytest.approx(expected, rel=1e-5)
