"""SCAFFOLD: weights and controls by hand, FedAvg without controls, and the drift that controls take out."""

from collections.abc import Iterable, Mapping
from functools import partial
from itertools import repeat

import numpy as np
import pytest
import torch
from safetensors.torch import save
from torch.utils.data import DataLoader

from lit_fedad.methods.fedavg import FedAvgClient
from lit_fedad.methods.scaffold import CONTROL, ScaffoldClient, ScaffoldServer

STEP = 0.1


def control_of(server):
    return {name.removeprefix(CONTROL): entry for name, entry in server.auxiliary.items()}


def scaffold_by_hand(
    hand,
    data: Mapping,
    participants: Iterable[list[int]],
    epochs: int = 1,
    global_step: float = 1.0,
    rates: Iterable[float] = repeat(STEP),
) -> tuple[np.ndarray, np.ndarray, dict[int, np.ndarray]]:
    """Karimireddy et al., Algorithm 1 with option II: weights x, control c and the clients' controls."""
    x, c = hand.start, np.zeros_like(hand.start)
    own = dict.fromkeys(data, c)
    for picked, step in zip(participants, rates, strict=False):
        moves, changes = [], []
        for client in picked:
            y, steps = x, 0
            for _ in range(epochs):
                for points, targets in hand.batches(data[client]):
                    y = y - step * (hand.gradient(y, points, targets) - own[client] + c)
                    steps += 1
            renewed = own[client] - c + (x - y) / (steps * step)
            moves.append(y - x)
            changes.append(renewed - own[client])
            own = {**own, client: renewed}
        x = x + global_step * sum(moves) / len(picked)
        c = c + sum(changes) / len(data)
    return x, c, own


@pytest.fixture
def scaffold(federate):
    def play(task, data, client=None, **settings):
        client = {"learning_rate": STEP, **(client or {})}
        return federate(ScaffoldClient, ScaffoldServer, task=task, data=data, client=client, **settings)

    return play


def assert_as_by_hand(hand, played, expected) -> None:
    x, c, own = expected
    # In double precision; sums of another order leave the last bits open.
    close = {"rtol": 1e-12, "atol": 1e-14}
    np.testing.assert_allclose(hand.theta(played.server.weights), x, **close)
    np.testing.assert_allclose(hand.theta(control_of(played.server)), c, **close)
    for client, control in own.items():
        np.testing.assert_allclose(hand.theta(played.pool.get(client)["own"]), control, **close)


# ------------------------------------------------------------------------------------------ by hand


def test_three_rounds_by_hand(scaffold, make_linear, points_by_hand, hand):
    """Client 0 makes two steps a round, the last on a shorter batch, client 1 one; both count the same."""
    played = scaffold(make_linear(), points_by_hand)
    assert_as_by_hand(hand, played, scaffold_by_hand(hand, points_by_hand, [[0, 1]] * 3))


def test_golden_numbers(scaffold, make_linear, points_by_hand, hand):
    """Exact: worked out in fractions."""
    server = scaffold(make_linear(), points_by_hand).server
    weights = [
        [0.17891010791015624, -0.6568486142578125, 0.276623216796875],
        [0.5534439741210937, 1.949127583984375, -0.360086263671875],
    ]
    control = [
        [0.6669928076171875, -0.6962785107421875, -0.3913419873046875],
        [-0.4809267919921875, 0.0872441357421875, -0.1975178271484375],
    ]
    np.testing.assert_allclose(hand.theta(server.weights), weights, rtol=1e-12)
    np.testing.assert_allclose(hand.theta(control_of(server)), control, rtol=1e-12)


def test_steps_are_counted_over_epochs(scaffold, make_linear, points_by_hand, hand):
    played = scaffold(make_linear(), points_by_hand, client={"local_epochs": 3})
    assert_as_by_hand(hand, played, scaffold_by_hand(hand, points_by_hand, [[0, 1]] * 3, epochs=3))


def test_the_server_has_a_step_of_its_own(scaffold, make_linear, points_by_hand, hand):
    played = scaffold(make_linear(), points_by_hand, server={"learning_rate": 0.25})
    assert_as_by_hand(hand, played, scaffold_by_hand(hand, points_by_hand, [[0, 1]] * 3, global_step=0.25))


def test_the_control_knows_a_rate_that_falls(scaffold, monkeypatch, make_linear, points_by_hand, hand):
    monkeypatch.setattr(ScaffoldClient, "decay_rounds", 3)
    rates = [STEP, 0.75 * STEP, 0.25 * STEP]  # (1 + cos(pi (t - 1) / 3)) / 2
    played = scaffold(make_linear(), points_by_hand)
    assert_as_by_hand(hand, played, scaffold_by_hand(hand, points_by_hand, [[0, 1]] * 3, rates=rates))


def test_with_half_of_the_clients_the_control_moves_half_as_far(scaffold, make_linear, make_points, hand):
    data = {client: make_points(2 + client, seed=client) for client in range(4)}
    played = scaffold(make_linear(), data, rounds=4, fraction=0.5)
    participants = [report.participants for report in played.history]
    assert all(len(picked) == 2 for picked in participants)
    assert set().union(*participants) == set(data)
    assert_as_by_hand(hand, played, scaffold_by_hand(hand, data, participants))


# --------------------------------------------------------------------------------------- properties


def test_the_common_control_is_the_mean_of_all_clients_own(scaffold, make_linear, make_points, hand):
    data = {client: make_points(2 + client, seed=client) for client in range(4)}
    played = scaffold(make_linear(), data, rounds=5, fraction=0.5)
    mean = np.mean([hand.theta(played.pool.get(client)["own"]) for client in data], axis=0)
    np.testing.assert_allclose(hand.theta(control_of(played.server)), mean, rtol=1e-12)
    played.server.register_clients(dict.fromkeys(range(5), 2))  # one joins, whose own is 0
    np.testing.assert_allclose(hand.theta(control_of(played.server)), mean * 4 / 5, rtol=1e-12)


@pytest.mark.slow
def test_controls_take_the_drift_out(federate, scaffold, make_linear, hand):
    """Clients that disagree, many steps a round: FedAvg stops beside the optimum of the mean loss, SCAFFOLD on it."""
    near = [((0.5, 0.0), (1.0, 0.0)), ((-0.5, 0.5), (0.0, 1.0)), ((0.0, -0.5), (-1.0, 0.0))]
    far = [((2.0, 1.0), (0.0, 3.0)), ((-1.0, 1.5), (2.0, -1.0)), ((0.5, -2.0), (-2.0, 2.0))]
    data = {
        client: DataLoader(
            [{"x": torch.tensor(x).double(), "y": torch.tensor(y).double()} for x, y in points], 3
        )
        for client, points in enumerate((near, far))
    }
    moments = [(x.T @ x, y.T @ x) for loader in data.values() for x, y in hand.batches(loader)]
    optimum = np.linalg.solve(sum(xx for xx, _ in moments), sum(yx for _, yx in moments).T).T
    settings = {"rounds": 15, "evaluate_every": 15}
    task = partial(make_linear, learning_rate=0.25)
    controlled = scaffold(task(), data, client={"local_epochs": 6, "learning_rate": 0.25}, **settings)
    drifted = federate(FedAvgClient, task=task(), data=data, client={"local_epochs": 6}, **settings)
    error, drift = (
        np.abs(hand.theta(played.server.weights) - optimum).max() for played in (controlled, drifted)
    )
    assert drift > 0.1
    assert error < 0.01 * drift


def test_running_statistics_are_averaged_without_weights(scaffold, make_classifier, make_points, tap):
    played = scaffold(make_classifier(), {0: make_points(6), 1: make_points(2, seed=1)}, channel=tap)
    sent = [update["downsample.1.running_mean"].double().numpy() for update in tap.uploads(3).values()]
    expected = ((sent[0] + sent[1]) / 2).astype(np.float32)
    np.testing.assert_array_equal(played.server.weights["downsample.1.running_mean"].numpy(), expected)


# --------------------------------------------------------------------------------------- reductions


def test_with_controls_held_at_zero_it_is_fedavg_bit_for_bit(federate, make_linear, make_points, exactly):
    class Uncontrolled(ScaffoldClient):
        def on_train_end(self):
            super().on_train_end()
            self.own = {name: torch.zeros_like(control) for name, control in self.own.items()}
            self.change = dict(self.own)

    data = {client: make_points(5, seed=client) for client in range(3)}
    held = federate(
        Uncontrolled, ScaffoldServer, task=make_linear(), data=data, client={"learning_rate": STEP}
    )
    average = federate(FedAvgClient, task=make_linear(), data=data)
    exactly(held.server.weights, average.server.weights)


# ------------------------------------------------------------------------------------- what crosses


def test_twice_the_numbers_of_fedavg_both_ways(federate, scaffold, make_linear, make_points):
    data = {0: make_points(4), 1: make_points(6, seed=1)}
    average = federate(FedAvgClient, task=make_linear(), data=data, rounds=1).history[0]
    weights, controls = (dict(make_linear().named_parameters()) for _ in range(2))
    size = len(save({**weights, **{CONTROL + name: entry for name, entry in controls.items()}}))
    for report in scaffold(make_linear(), data).history:
        assert report.elements_up == {c: 2 * count for c, count in average.elements_up.items()}
        assert report.bytes_up == report.bytes_down == {0: size, 1: size}


def test_only_what_trains_has_a_control(scaffold, make_classifier, make_points):
    server = scaffold(make_classifier(), {0: make_points(4)}, rounds=1).server
    assert set(control_of(server)) == {n for n, p in make_classifier().named_parameters() if p.requires_grad}


def test_a_weight_that_the_loss_does_not_use_stays(scaffold, make_linear, points_by_hand):
    class Half(make_linear):
        def __init__(self):
            super().__init__()
            self.unused = torch.nn.Parameter(torch.ones(2, dtype=torch.float64))

    played = scaffold(Half(), points_by_hand)
    assert played.server.weights["unused"].tolist() == [1, 1]
    assert control_of(played.server)["unused"].tolist() == [0, 0]


def test_without_a_step_the_control_stays(make_linear):
    """In 16-mixed gradients of all of a small client's steps may overflow, and none is taken."""
    client = ScaffoldClient(make_linear())
    client.on_train_start()
    client.on_train_end()
    assert not any(entry.any() for entry in (*client.change.values(), *client.own.values()))


def test_a_client_that_changed_nothing_sends_the_controls_that_it_received(make_linear):
    """What has a name of the server's message is of its kind: rules for weights measure the change from it."""
    client = ScaffoldClient(make_linear())
    client.auxiliary = {name: torch.full(form.shape, 3.0) for name, form in client.auxiliary_spec().items()}
    client.change = {name: torch.zeros_like(control) for name, control in client.own.items()}
    sent = client.send([])
    assert all(torch.equal(sent[name], control.to(sent[name])) for name, control in client.auxiliary.items())
