"""APFL: the paper's numbers, its limits, and a mixture that stays personal."""

from functools import partial

import numpy as np
import pytest
import torch

from lit_fedad.methods.apfl import APFLClient
from lit_fedad.methods.local import LocalClient

STEP, RATE, ROUNDS = 0.1, 0.05, 3
RUNNING = {"downsample.1.running_mean", "downsample.1.running_var"}

# Weights are in double precision here, the mixture weight alpha in single.
nearly = partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-7)


def by_hand(hand, data, alpha, adaptive):
    """The shared weights w, and each client's v and alpha, after three rounds."""
    shared, personal, alphas = hand.start, dict.fromkeys(data, hand.start), dict.fromkeys(data, alpha)
    for _ in range(ROUNDS):
        trained = {}
        for client, loader in data.items():
            w, v, a = shared, personal[client], alphas[client]
            for x, y in hand.batches(loader):
                at_mixture = hand.gradient(a * v + (1 - a) * w, x, y)
                slope = ((v - w) * at_mixture).sum() + 0.02 * a
                moved = np.clip(a - RATE * slope, 0, 1) if adaptive else a
                w, v, a = w - STEP * hand.gradient(w, x, y), v - STEP * a * at_mixture, moved
            trained[client], personal[client], alphas[client] = w, v, a
        total = sum(len(loader.dataset) for loader in data.values())
        shared = sum(len(data[client].dataset) / total * w for client, w in trained.items())
    return shared, personal, alphas


@pytest.fixture
def apfl(federate, make_linear):
    """Plays APFL on the linear task."""

    def play(data, client=None, **settings):
        client = {"alpha_learning_rate": RATE, **(client or {})}
        return federate(APFLClient, task=make_linear(), data=data, client=client, **settings)

    return play


# ------------------------------------------------------------------------------------------ the paper's numbers


@pytest.mark.parametrize("clients", [(0, 1), (0,), (0, 0)])
@pytest.mark.parametrize(("alpha", "adaptive"), [(0.5, True), (0.9, True), (0.25, False)])
def test_three_rounds_are_the_papers(apfl, hand, points_by_hand, clients, alpha, adaptive):
    data = {number: points_by_hand[client] for number, client in enumerate(clients)}
    played = apfl(data, client={"alpha": alpha, "adaptive": adaptive})
    shared, personal, alphas = by_hand(hand, data, alpha, adaptive)
    np.testing.assert_allclose(hand.theta(played.server.weights), shared, rtol=1e-12)
    for client in data:
        own = played.pool.get(client)
        nearly(hand.theta(own["personal_entries"]), personal[client])
        nearly(own["alpha"], alphas[client])


@pytest.mark.parametrize(("alpha", "slope", "end"), [(0.05, 10.0, 0.0), (0.95, -10.0, 1.0)])
def test_alpha_is_clipped(make_linear, alpha, slope, end):
    client = APFLClient(make_linear(), alpha=alpha, alpha_learning_rate=STEP)
    client.alpha.grad = torch.tensor(slope)
    client.on_before_optimizer_step(torch.optim.SGD(client.task.parameters(), lr=STEP))
    assert client.alpha == end


# ---------------------------------------------------------------------------------------------------- its limits


def test_at_alpha_0_running_statistics_are_still_local(federate, make_classifier, make_points):
    data = {c: make_points(4 + 2 * c, c) for c in range(2)}
    client = {"alpha": 0.0, "adaptive": False}
    played = federate(APFLClient, task=make_classifier(), data=data, client=client)
    for number in data:
        predicts = played.history[-1].metrics[number]
        differ = {n for n, entry in played.server.weights.items() if not torch.equal(predicts[n], entry)}
        assert differ - {"downsample.1.num_batches_tracked"} == RUNNING


def test_at_alpha_1_every_client_is_on_its_own(federate, make_classifier, make_points, exactly):
    data = {c: make_points(4 + 2 * c, c) for c in range(2)}
    alone, fresh = {"alpha": 1.0, "adaptive": False}, {"keep_optimizer": False}
    ours = federate(APFLClient, task=make_classifier(), data=data, shuffle=True, client=alone)
    theirs = federate(LocalClient, task=make_classifier(), data=data, shuffle=True, client=fresh)
    exactly(ours.history[-1].metrics, theirs.history[-1].metrics)
    for number in data:
        exactly(ours.pool.get(number)["personal_entries"], theirs.pool.get(number)["own_entries"])


# -------------------------------------------------------------------------------------------- what is personal


def test_predicts_with_the_mixture(apfl, hand, points_by_hand):
    played = apfl(points_by_hand)
    w = hand.theta(played.server.weights)
    for client in points_by_hand:
        own = played.pool.get(client)
        a, v = float(own["alpha"]), hand.theta(own["personal_entries"])
        assert not np.allclose(v, w)
        nearly(hand.theta(played.history[-1].metrics[client]), a * v + (1 - a) * w)


def test_the_frozen_backbone_exists_once(make_task, make_classifier):
    for task in (make_task(), make_classifier()):
        client = APFLClient(task)
        assert client.personal.backbone is task.backbone
        shared = {id(p) for p in task.parameters() if p.requires_grad}
        assert shared.isdisjoint(id(p) for p in client.personal.parameters())
