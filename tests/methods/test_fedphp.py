"""FedPHP: the paper's numbers, its limits, and a personal model that stays personal."""

import numpy as np
import pytest
import torch

from lit_fedad.condensation.kernels import mmd
from lit_fedad.methods.fedphp import FedPHPClient

STEP, ROUNDS = 0.1, 3


def authors_kernels(rows):
    """As in the authors' code: five bandwidths, each twice the last, the middle one the mean squared distance.

    Theirs is 1e-8 larger, for rows that are all equal.
    """
    squares = ((rows[:, None] - rows) ** 2).sum(-1)
    bandwidth = squares.sum() / (len(rows) ** 2 - len(rows))
    return squares, [bandwidth / 2**2 * 2**i for i in range(5)]


def authors_mmd(one, other):
    squares, widths = authors_kernels(np.concatenate([one, other]))
    kernels, n = sum(np.exp(-squares / width) for width in widths), len(one)
    return (kernels[:n, :n] + kernels[n:, n:] - kernels[:n, n:] - kernels[n:, :n]).mean()


def mmd_slope(one, other):
    """Derivative of the discrepancy by each row of `one`, with constant bandwidths."""
    rows, n = np.concatenate([one, other]), len(one)
    squares, widths = authors_kernels(rows)
    falls = sum(-2 / width * np.exp(-squares / width) for width in widths)
    apart = falls[:, :, None] * (rows[:, None] - rows)  # of k(a, b) by a
    return 2 * apart[:n, :n].mean(1) / n - 2 * apart[:n, n:].mean(1) / n


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
            kept = mu * (t - 1) / ROUNDS  # the rounds that it has taken part in before
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


def test_discrepancy_is_the_authors():
    draw = torch.Generator().manual_seed(0)
    one, other = torch.randn(2, 5, 3, generator=draw, dtype=torch.float64) + torch.tensor([[[0.0]], [[1.0]]])
    ours = float(mmd(one, other, "gaussian"))
    assert ours == pytest.approx(authors_mmd(one.numpy(), other.numpy()), rel=1e-12)


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


def test_shares_count_the_clients_own_rounds(fedphp, hand, points_by_hand, tap):
    """Half of the clients a round: two of four rounds are expected, and a first round leaves nothing of the start."""
    client = {"rounds": 4, "fraction": 0.5, "mu": 0.8, "weight": 0.0}
    played = fedphp(points_by_hand, rounds=4, fraction=0.5, client=client, channel=tap)
    for number in points_by_hand:
        sent = [
            hand.theta(tap.uploads(report.round)[number])
            for report in played.history
            if report.round > 0 and number in report.participants
        ]
        inherited = hand.start
        for count, trained in enumerate(sent):
            share = 0.8 * min(count / 2, 1)
            inherited = share * inherited + (1 - share) * trained
        np.testing.assert_allclose(hand.theta(played.pool.get(number)["inherited"]), inherited, rtol=1e-12)
        assert played.pool.get(number)["participations"] == len(sent)


def test_running_statistics_are_inherited_as_weights_are(
    federate, make_classifier, make_points, tap, exactly
):
    """Looking at the inherited model's features, batch by batch, does not move its statistics."""
    client, data = {"rounds": 2, "mu": 0.5}, {0: make_points(6)}
    played = federate(FedPHPClient, task=make_classifier(), data=data, rounds=2, client=client, channel=tap)
    inherited, first, second = played.pool.get(0)["inherited"], tap.uploads(1)[0], tap.uploads(2)[0]
    for name in ("downsample.1.running_mean", "downsample.1.running_var", "downsample.1.weight"):
        exactly(inherited[name], torch.lerp(second[name], first[name], 0.25))


# -------------------------------------------------------------------------------------------- what is personal


def test_predicts_with_the_inherited_model(play, exactly):
    played = play()
    for client in (0, 1):
        inherited = played.pool.get(client)["inherited"]
        predicts = played.history[-1].metrics[client]
        exactly({name: predicts[name] for name in inherited}, inherited)
        assert any(not torch.equal(predicts[name], w) for name, w in played.server.weights.items())
