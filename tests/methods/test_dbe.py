"""DBE: the paper's numbers, its limits, and a bias that stays personal."""

from functools import partial

import numpy as np
import pytest
import torch
from safetensors.torch import save
from torch import nn
from torch.utils.data import DataLoader

from lit_fedad.methods.dbe import MEAN, DBEClient
from lit_fedad.methods.fedavg import FedAvgClient, FedAvgServer
from lit_fedad.tasks.autoencoder import Autoencoder
from lit_fedad.tasks.classifier import Classifier

STEP, ROUNDS = 0.1, 3

# Weights are in double precision here, the bias and the means in single.
nearly = partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)


def by_hand(hand, data, kappa, momentum):
    """The server's weights, g, and each client's bias and running mean after three rounds, by the authors' rules."""
    sizes = {client: len(loader.dataset) for client, loader in data.items()}
    share = {client: size / sum(sizes.values()) for client, size in sizes.items()}

    def train(client, w, bias, common):
        running = np.zeros(2)
        for x, y in hand.batches(data[client]):
            features = x @ w.T
            running = (1 - momentum) * running + momentum * features.mean(0)
            error = (features + bias - y) / len(x)
            # Of mean (r - g)^2 / 2 over two channels; an image's share in r is momentum / batch.
            drift = 0 if common is None else kappa * (running - common) / 2 * momentum / len(x)
            w = w - STEP * (error + drift).T @ x
            bias = bias if common is None else bias - STEP * error.sum(0)
        return w, bias, running

    # A period without g, from the initial weights, to which all clients then return.
    first = {client: train(client, hand.start, np.zeros(2), None)[2] for client in data}
    common = sum(share[client] * running for client, running in first.items())
    shared, bias, running = hand.start, dict.fromkeys(data, np.zeros(2)), {}
    for _ in range(ROUNDS):
        trained = {}
        for client in data:
            trained[client], bias[client], running[client] = train(client, shared, bias[client], common)
        shared = sum(share[client] * w for client, w in trained.items())
    return shared, common, bias


def without_bias(task, **settings):
    """The task, with an optimiser of all that trains now: a bias that comes later stays as it is."""
    trained = [p for p in task.parameters() if p.requires_grad]
    task.configure_optimizers = lambda: torch.optim.SGD(trained, lr=STEP, **settings)
    return task


@pytest.fixture
def dbe(federate, make_linear):
    """Plays DBE on the linear task."""

    def play(data, task=None, **settings):
        return federate(DBEClient, FedAvgServer, task=task or make_linear(), data=data, **settings)

    return play


# ------------------------------------------------------------------------------------------ the paper's numbers


@pytest.mark.parametrize("clients", [(0, 1), (0,), (0, 0)])
@pytest.mark.parametrize(("kappa", "momentum"), [(1.0, 1.0), (4.0, 0.3), (0.0, 1.0)])
def test_three_rounds_are_the_authors(dbe, hand, points_by_hand, clients, kappa, momentum):
    data = {number: points_by_hand[client] for number, client in enumerate(clients)}
    played = dbe(data, client={"kappa": kappa, "momentum": momentum})
    shared, common, bias = by_hand(hand, data, kappa, momentum)
    nearly(hand.theta(played.server.weights), shared)
    nearly(played.server.auxiliary[MEAN], common)
    for client in data:
        nearly(played.pool.get(client)["own_entries"]["offset"], bias[client])


def test_one_step_in_numbers(dbe, exactly):
    """Points (1, 2) and (0, 1) with y = 0: initial features (-1.375, 3.75) and (-0.875, 1.5)."""
    rows = [{"x": torch.tensor(x).double(), "y": torch.zeros(2).double()} for x in ([1.0, 2.0], [0.0, 1.0])]
    data = {0: DataLoader(rows[:1] * 3, batch_size=3), 1: DataLoader(rows[1:])}
    played = dbe(data, rounds=1, client={"kappa": 0.8, "momentum": 1.0})
    # One batch a client: g = (3 * -1.375 - 0.875) / 4 and (3 * 3.75 + 1.5) / 4
    exactly(played.server.auxiliary[MEAN], torch.tensor([-1.25, 3.1875]))
    # Client 1: r = (-0.875, 1.5), r - g = (0.375, -1.6875); the bias moves by the error alone.
    nearly(played.pool.get(1)["own_entries"]["offset"], [0.0875, -0.15])
    drift = (0.375**2 + 1.6875**2) / 4
    assert played.history[-1].per_client[1]["drift"] == pytest.approx(drift)
    assert played.history[-1].per_client[1]["loss"] == pytest.approx((0.875**2 + 1.5**2) / 2 + 0.8 * drift)


def test_the_first_period_leaves_nothing_but_the_common_mean(federate, make_classifier, make_points, exactly):
    data = {c: make_points(4 + 2 * c, c) for c in range(2)}
    played = federate(DBEClient, FedAvgServer, task=make_classifier(), data=data, shuffle=True, rounds=0)
    start = make_classifier().state_dict()
    exactly(played.server.weights, {name: start[name] for name in played.server.weights})
    for client in data:
        predicts = played.history[-1].metrics[client]
        exactly(predicts.pop("offset"), torch.zeros(3))
        exactly(predicts, dict(start))
    assert played.server.auxiliary[MEAN].all()


# ---------------------------------------------------------------------------------------------------- its limits


def test_with_neither_regulariser_nor_bias_it_is_fedavg(federate, make_classifier, make_points, dbe, exactly):
    data = {c: make_points(4 + 2 * c, c) for c in range(2)}
    fixed = without_bias(make_classifier(), momentum=0.9)
    ours = dbe(data, fixed, shuffle=True, client={"kappa": 0.0})
    theirs = federate(FedAvgClient, task=make_classifier(), data=data, shuffle=True)
    exactly(ours.server.weights, theirs.server.weights)
    for client in data:
        predicts = ours.history[-1].metrics[client]
        exactly(predicts.pop("offset"), torch.zeros(3))
        exactly(predicts, theirs.history[-1].metrics[client])


# -------------------------------------------------------------------------------------------- what is personal


def test_means_cross_once_and_biases_never(dbe, points_by_hand, tap):
    once, *rounds = dbe(points_by_hand, channel=tap).history
    weights = {"layer.weight": torch.zeros(2, 2).double(), "layer.bias": torch.zeros(2).double()}
    mean = {MEAN: torch.zeros(2)}
    assert tap.names == {*weights, *mean}
    assert (once.round, once.exchange) == (0, "feature mean")
    assert once.bytes_up == dict.fromkeys((0, 1), len(save(mean)))
    assert once.elements_up == {0: 2, 1: 2}
    assert once.bytes_down == {0: 0, 1: 0}
    for report in rounds:
        assert report.bytes_up == dict.fromkeys((0, 1), len(save(weights)))
        assert report.bytes_down == dict.fromkeys((0, 1), len(save({**weights, **mean})))


def test_predicts_with_its_own_bias(dbe, hand, points_by_hand):
    batch = {"x": torch.ones(1, 2).double(), "y": torch.zeros(1, 2).double()}
    played = dbe(
        points_by_hand, question=lambda client, number: client.predict_step(batch).image_score.detach()
    )
    for client in (0, 1):
        features = hand.theta(played.server.weights).sum(1)
        shifted = features + played.pool.get(client)["own_entries"]["offset"].numpy()
        nearly(played.history[-1].metrics[client], [np.square(shifted).sum()])


class ColourMeans(nn.Module):
    """An encoder."""

    num_features = 3

    def forward(self, images):
        return images.mean((2, 3))


def flat_decoder(width, size):
    return nn.Sequential(nn.Linear(width, 3 * size * size), nn.Unflatten(1, (3, size, size)))


@pytest.mark.parametrize("kind", ["classifier", "autoencoder", "memory bank"])
def test_the_bias_shifts_the_features_of_every_task(make_task, kind):
    task = {
        "classifier": lambda: Classifier(ColourMeans(), classes=2, augment=False),
        "autoencoder": lambda: Autoencoder(ColourMeans(), flat_decoder, 32, mean=[0.0] * 3, std=[1.0] * 3),
        "memory bank": make_task,
    }[kind]()
    batch = {"image": torch.randn(2, 3, 32, 32), "label": torch.tensor([0, 1])}
    client = DBEClient(task)
    with torch.no_grad():
        before = task(batch)
        client.offset += torch.arange(task.num_features)
        torch.testing.assert_close(task(batch), before + torch.arange(task.num_features))
