"""FedPHP: the paper's numbers, its limits, and a personal model that stays personal."""

import numpy as np
import pytest
import torch
from safetensors.torch import save
from torch.utils.data import DataLoader

from lit_fedad.contracts import Update
from lit_fedad.federation.aggregation import weighted_mean
from lit_fedad.memory.reduce import SampleReduce
from lit_fedad.methods.fedavg import FedAvgClient
from lit_fedad.methods.fedphp import FedPHPClient, rbf_mmd

BANDWIDTHS = (10, 15, 20, 50)
STEP, ROUNDS = 0.1, 3


def mmd_by_loop(one, other):
    def kernel(a, b):
        return sum(np.exp(-((a - b) ** 2).sum() / (2 * width)) for width in BANDWIDTHS)

    def mean(rows, columns):
        return sum(kernel(a, b) for a in rows for b in columns) / (len(rows) * len(columns))

    return mean(one, one) + mean(other, other) - 2 * mean(one, other)


def mmd_slope(one, other):
    """Derivative of the discrepancy by each row of `one`."""

    def slope(a, b):
        return sum(-(a - b) / width * np.exp(-((a - b) ** 2).sum() / (2 * width)) for width in BANDWIDTHS)

    n, m = len(one), len(other)
    within = [2 / n**2 * sum(slope(row, each) for each in one) for row in one]
    across = [2 / (n * m) * sum(slope(row, each) for each in other) for row in one]
    return np.array(within) - np.array(across)


def by_hand(hand, data, mu, weight):
    """The server's weights, and each client's inherited ones, after three rounds."""
    shared, inherited = hand.start, dict.fromkeys(data, hand.start)
    for t in range(1, ROUNDS + 1):
        trained = {}
        for client, loader in data.items():
            w = shared
            for x, y in hand.batches(loader):
                drift = mmd_slope(x @ w.T, x @ inherited[client].T).T @ x
                w = w - STEP * ((1 - weight) * hand.gradient(w, x, y) + weight * drift)
            kept = mu * t / ROUNDS
            inherited[client] = kept * inherited[client] + (1 - kept) * w
            trained[client] = w
        total = sum(len(loader.dataset) for loader in data.values())
        shared = sum(len(data[client].dataset) / total * w for client, w in trained.items())
    return shared, inherited


@pytest.fixture
def fedphp(federate, make_linear):
    """Plays FedPHP on the linear task."""

    def play(data, rounds=ROUNDS, client=None, **settings):
        client = {"rounds": ROUNDS, **(client or {})}
        return federate(FedPHPClient, task=make_linear(), data=data, rounds=rounds, client=client, **settings)

    return play


@pytest.fixture(params=["classifier", "memory bank"])
def play(request, federate, make_classifier, make_points, make_task, make_loader):
    """Plays three rounds of two clients, on either task."""

    def play(**settings):
        if request.param == "classifier":
            task, data = make_classifier(), {c: make_points(4 + 2 * c, c) for c in range(2)}
        else:
            task, data = make_task(learning_rate=0.01), {c: make_loader(3 + c, c) for c in range(2)}
        client = {"rounds": ROUNDS}
        return federate(FedPHPClient, task=task, data=data, shuffle=True, client=client, **settings)

    return play


# ------------------------------------------------------------------------------------------ the paper's numbers


def test_discrepancy_is_the_double_loop():
    draw = torch.Generator().manual_seed(0)
    one, other = torch.randn(2, 5, 3, generator=draw, dtype=torch.float64) * 4
    by_loop = mmd_by_loop(one.numpy(), other[:4].numpy())
    assert float(rbf_mmd(one, other[:4])) == pytest.approx(by_loop, rel=1e-12)


def test_discrepancy_is_nothing_for_equal_sets_and_eight_for_far_ones():
    """Far ones: four kernels, each 1 within a set of one point and 0 between sets, 4 + 4 - 0."""
    rows = torch.eye(3, dtype=torch.float64)
    assert float(rbf_mmd(rows, rows)) == pytest.approx(0, abs=1e-12)
    assert float(rbf_mmd(rows[:1], rows[:1] + 1000)) == pytest.approx(8)


@pytest.mark.parametrize("clients", [(0, 1), (0,), (0, 0)])
def test_three_rounds_are_the_papers(fedphp, hand, points_by_hand, clients):
    data = {number: points_by_hand[client] for number, client in enumerate(clients)}
    played = fedphp(data, client={"mu": 0.9, "weight": 0.4})
    shared, inherited = by_hand(hand, data, mu=0.9, weight=0.4)
    # Double precision: hand and machine differ in the order of sums only.
    np.testing.assert_allclose(hand.theta(played.server.weights), shared, rtol=1e-12)
    for client in data:
        kept = played.pool.get(client)["inherited"]
        np.testing.assert_allclose(hand.theta(kept), inherited[client], rtol=1e-12)


def test_one_step_in_numbers(fedphp, hand):
    """One point x = (1, 2), y = 0: features (-1.375, 3.75) are the gradient's factor, and mu_1 = 0.5."""
    point = {"x": torch.tensor([1.0, 2.0]).double(), "y": torch.zeros(2).double()}
    played = fedphp({0: DataLoader([point])}, rounds=1, client={"rounds": 1, "mu": 0.5, "weight": 0.0})
    trained = [[0.6375, -0.725, 0.2625], [-0.125, 1.25, -0.875]]
    inherited = [[0.56875, -0.8625, 0.19375], [0.0625, 1.625, -0.6875]]
    np.testing.assert_allclose(hand.theta(played.server.weights), trained, rtol=1e-14)
    np.testing.assert_allclose(hand.theta(played.pool.get(0)["inherited"]), inherited, rtol=1e-14)


def test_running_statistics_are_inherited_as_weights_are(
    federate, make_classifier, make_points, tap, exactly
):
    """Looking at the inherited model's features, batch by batch, does not move its statistics."""
    client, data = {"rounds": 2, "mu": 0.5}, {0: make_points(6)}
    played = federate(FedPHPClient, task=make_classifier(), data=data, rounds=1, client=client, channel=tap)
    inherited, sent, start = (
        played.pool.get(0)["inherited"],
        tap.uploads(1)[0],
        make_classifier().state_dict(),
    )
    for name in ("downsample.1.running_mean", "downsample.1.running_var", "downsample.1.weight"):
        exactly(inherited[name], torch.lerp(sent[name], start[name], 0.25))


# ---------------------------------------------------------------------------------------------------- its limits


def test_without_the_discrepancy_the_server_is_fedavgs(federate, make_classifier, make_points, exactly):
    data = {c: make_points(4 + 2 * c, c) for c in range(2)}
    client = {"rounds": ROUNDS, "weight": 0.0}
    ours = federate(FedPHPClient, task=make_classifier(), data=data, shuffle=True, client=client)
    theirs = federate(FedAvgClient, task=make_classifier(), data=data, shuffle=True)
    exactly(ours.server.weights, theirs.server.weights)


def test_without_inheritance_the_personal_model_is_what_the_client_sent(
    federate, make_classifier, make_points, tap, exactly
):
    data = {c: make_points(4 + 2 * c, c) for c in range(2)}
    client = {"rounds": ROUNDS, "mu": 0.0}
    played = federate(FedPHPClient, task=make_classifier(), data=data, client=client, channel=tap)
    sent = tap.uploads(ROUNDS)
    assert not torch.equal(sent[0]["classifier.weight"], sent[1]["classifier.weight"])
    for number in data:
        exactly(played.pool.get(number)["inherited"], sent[number])
    exactly(weighted_mean({0: Update(sent[0], 4), 1: Update(sent[1], 6)}), played.server.weights)


# -------------------------------------------------------------------------------------------- what is personal


def test_bytes_are_fedavgs(fedphp, points_by_hand):
    size = len(save({"layer.weight": torch.zeros(2, 2).double(), "layer.bias": torch.zeros(2).double()}))
    for report in fedphp(points_by_hand).history[-3:]:
        assert report.bytes_up == report.bytes_down == {0: size, 1: size}
        assert report.elements_up == {0: 6, 1: 6}


def test_an_absent_client_keeps_its_own(fedphp, hand, points_by_hand, exactly):
    short, long = (fedphp(points_by_hand, rounds=rounds, fraction=0.5) for rounds in (1, 2))
    (present,), (later,) = (report.participants for report in long.history[-2:])
    assert present != later
    exactly(long.pool.get(present), short.pool.get(present))
    assert not np.array_equal(hand.theta(short.pool.get(present)["inherited"]), hand.start)
    exactly(hand.theta(short.pool.get(later)["inherited"]), hand.start)


def test_predicts_with_the_inherited_model(play, exactly):
    played = play()
    for client in (0, 1):
        inherited = played.pool.get(client)["inherited"]
        predicts = played.history[-1].metrics[client]
        exactly({name: predicts[name] for name in inherited}, inherited)
        assert any(not torch.equal(predicts[name], w) for name, w in played.server.weights.items())


def test_the_bank_that_scores_was_made_with_the_inherited_model(federate, make_task, make_loader, exactly):
    # A bank that holds every patch: what it must be is simply the features.
    data = {c: make_loader(3, c) for c in range(2)}
    parts = {"reduce": SampleReduce(), "slots": 3 * 16, "learning_rate": 0.05}
    played = federate(FedPHPClient, task=make_task(**parts), data=data, client={"rounds": ROUNDS})
    for client, loader in data.items():
        task = make_task(**parts)

        @torch.no_grad()
        def bank(weights, task=task, loader=loader):
            task.load_state_dict(weights, strict=False)
            return torch.cat([task(batch).flatten(0, 1) for batch in loader])

        scores = played.history[-1].metrics[client]["memory"]
        exactly(scores, bank(played.pool.get(client)["inherited"]))
        assert not torch.equal(scores, bank(played.server.weights))
