"""Methods that train a personal model beside the shared one: Ditto and pFedMe by hand, and what holds for all."""

from functools import partial

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from lit_fedad.experiment.console import never_trained
from lit_fedad.methods.apfl import APFLClient
from lit_fedad.methods.ditto import DittoClient
from lit_fedad.methods.fedavg import FedAvgClient
from lit_fedad.methods.fedbn import FedBNClient
from lit_fedad.methods.fedphp import FedPHPClient
from lit_fedad.methods.local import LocalClient
from lit_fedad.methods.pfedme import PFedMeClient

STEP = 0.1
APART = {
    "ditto": (DittoClient, {"lam": 0.0}),
    "apfl": (APFLClient, {"alpha": 1.0, "adaptive": False}),
}


def ditto_by_hand(hand, data, participants, lam=0.6):
    """Li et al., Algorithm 1, averaged by images, with as many personal as shared steps: w, and each client's v."""
    w, personal = hand.start, dict.fromkeys(data, hand.start)
    for picked in participants:
        total, images = np.zeros_like(w), sum(len(data[client].dataset) for client in picked)
        for client in picked:
            y, v = w, personal[client]
            for points, targets in hand.batches(data[client]):
                y = y - STEP * hand.gradient(y, points, targets)
                v = v - STEP * (hand.gradient(v, points, targets) + lam * (v - w))
            total, personal[client] = total + len(data[client].dataset) / images * y, v
        w = total
    return w, personal


def pfedme_by_hand(hand, data, participants, lam=3.0, eta=0.05, beta=1.5):
    """Dinh et al., Algorithm 1, with three gradient steps for theta, from the theta of the batch before."""
    w, personal = hand.start, {}
    for picked in participants:
        total, images = np.zeros_like(w), sum(len(data[client].dataset) for client in picked)
        for client in picked:
            own = theta = w
            for points, targets in hand.batches(data[client]):
                for _ in range(3):
                    theta = theta - STEP * (hand.gradient(theta, points, targets) + lam * (theta - own))
                own = own - eta * lam * (own - theta)
            total, personal[client] = total + len(data[client].dataset) / images * own, theta
        w = (1 - beta) * w + beta * total
    return w, personal


@pytest.mark.parametrize(
    ("kind", "client", "server", "by_hand"),
    [
        (DittoClient, {"lam": 0.6}, {}, ditto_by_hand),
        (
            PFedMeClient,
            {"lam": 3.0, "inner_steps": 3, "learning_rate": 0.05},
            {"server_optimizer": partial(torch.optim.SGD, lr=1.5)},
            pfedme_by_hand,
        ),
    ],
)
def test_rounds_by_hand_with_half_of_the_clients(
    federate, make_linear, make_points, hand, kind, client, server, by_hand
):
    data = {number: make_points(2 + number, seed=number) for number in range(4)}
    settings = {"client": client, "server": server, "rounds": 4, "fraction": 0.5}
    played = federate(kind, task=make_linear(), data=data, **settings)
    participants = [report.participants for report in played.history]
    assert all(len(picked) == 2 for picked in participants)
    w, personal = by_hand(hand, data, participants)
    np.testing.assert_allclose(hand.theta(played.server.weights), w, rtol=1e-12)
    for number in data:  # a client that has not taken part predicts with the shared model
        answer, v = hand.theta(played.history[-1].metrics[number]), personal.get(number, w)
        np.testing.assert_allclose(answer, v, rtol=1e-12)
        if kind is DittoClient:
            own = hand.theta(played.pool.get(number)["personal_entries"])
            np.testing.assert_allclose(own, v, rtol=1e-12)


@pytest.fixture(params=APART)
def apart(request):
    """A client's class and settings under which nothing shared reaches its personal model."""
    return APART[request.param]


@pytest.fixture(params=["memory bank", "classifier"])
def two_clients(request, make_task, make_loader, make_classifier, make_points):
    """Tasks and data of two clients: features attract to the bank of the model that made them, or are normalised."""
    if request.param == "classifier":
        return make_classifier, {0: make_points(6), 1: make_points(4, seed=1)}
    return partial(make_task, learning_rate=0.05), {0: make_loader(5), 1: make_loader(3, seed=1)}


def test_apart_from_the_shared_model_it_trains_as_a_client_that_is_alone(
    federate, two_clients, exactly, apart
):
    (client_class, client), (make, data) = apart, two_clients
    own = federate(client_class, task=make(), data=data, client=client)
    alone = federate(LocalClient, task=make(), data=data, client={"keep_optimizer": False})
    exactly(own.history[-1].metrics, alone.history[-1].metrics)


def test_the_shared_model_trains_as_without_a_personal_one(federate, two_clients, exactly, apart):
    (client_class, client), (make, data) = apart, two_clients
    ours = federate(client_class, task=make(), data=data, client=client)
    exactly(ours.server.weights, federate(FedAvgClient, task=make(), data=data).server.weights)


def test_it_has_the_learning_rate_of_the_round(federate, make_linear, hand, apart):
    """One point with y = 0 and x = (1, 0): f = W x + b shrinks by 1 - 2 rate in every step, for |x|^2 + 1 = 2."""

    class Falling(make_linear):
        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=(0.4, 0.1, 0.2, 0.05)[self.round])

    point = {"x": torch.tensor([1.0, 0.0]).double(), "y": torch.zeros(2).double()}
    client_class, client = apart
    data = {number: DataLoader([point]) for number in range(2)}
    played = federate(client_class, task=Falling(), data=data, client=client)
    f = (0.8 * 0.6 * 0.9) * np.array([0.5 + 0.125, 0.25 - 0.5])
    for number in data:
        theta = hand.theta(played.pool.get(number)["personal_entries"])
        np.testing.assert_allclose(theta @ (1, 0, 1), f, rtol=1e-12)


@pytest.mark.parametrize(
    ("kind", "client"),
    [(DittoClient, {}), (APFLClient, {}), (PFedMeClient, {}), (FedPHPClient, {"rounds": 2})],
)
def test_the_servers_model_is_the_shared_one(federate, make_linear, make_points, hand, kind, client):
    played = federate(
        kind, task=make_linear(), data={0: make_points(4), 1: make_points(3, seed=1)}, client=client
    )
    (found,) = played.ask(2, played.evaluator, [0], "server").values()
    assert (hand.theta(found) == hand.theta(played.server.weights)).all()
    assert not np.allclose(hand.theta(found), hand.theta(played.history[-1].metrics[0]))


@pytest.mark.parametrize(
    ("kind", "said"), [(FedBNClient, True), (LocalClient, True), (DittoClient, True), (FedAvgClient, False)]
)
def test_who_never_trained_what_is_personal_is_said(federate, make_classifier, make_points, kind, said):
    data = {number: make_points(4, number) for number in range(3)}
    played = federate(kind, task=make_classifier(), data=data, rounds=1, fraction=0.6)
    (absent,) = {*data} - {*played.history[-1].participants}
    line = never_trained(played)
    assert line.startswith(f"client {absent} trained in no round" if said else "")
    assert bool(line) == said
    assert never_trained(federate(kind, task=make_classifier(), data=data, rounds=1)) == ""


def test_a_bank_of_local_images_needs_no_round(federate, make_task, make_loader):
    data = {number: make_loader(3, seed=number) for number in range(3)}
    assert never_trained(federate(FedAvgClient, task=make_task(), data=data, rounds=1, fraction=0.6)) == ""


@pytest.mark.parametrize("said", [{"own_model": True}, {"own_model": False}, {}])
def test_a_client_that_deploys_says_whose_model_that_is(said):
    """One that did not was scored as if all clients predicted with one model: the first client's score for each."""
    own = {**said, "deploy": lambda self, which="own": None}
    if said:
        assert type("Mixed", (FedAvgClient,), own).own_model == said["own_model"]
    else:
        with pytest.raises(TypeError, match="Mixed overrides deploy: say own_model"):
            type("Mixed", (FedAvgClient,), own)
