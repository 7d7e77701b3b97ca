"""What holds for every method that shares parameters, or none."""

import pytest
import torch
from helpers.methods import outcome, restarted

from lit_fedad.contracts.state import state_of
from lit_fedad.memory.reduce import SampleReduce
from lit_fedad.methods.apfl import APFLClient
from lit_fedad.methods.apple import AppleClient, AppleServer
from lit_fedad.methods.dbe import DBEClient
from lit_fedad.methods.ditto import DittoClient
from lit_fedad.methods.fedavg import FedAvgClient, FedAvgServer
from lit_fedad.methods.fedbn import FedBNClient, FedBNServer
from lit_fedad.methods.feddyn import FedDynClient, FedDynServer
from lit_fedad.methods.fednova import FedNovaClient, FedNovaServer
from lit_fedad.methods.fedphp import FedPHPClient
from lit_fedad.methods.fedprox import FedProxClient
from lit_fedad.methods.fedrep import FedRepClient
from lit_fedad.methods.local import LocalClient
from lit_fedad.methods.moon import MoonClient
from lit_fedad.methods.pfedme import PFedMeClient
from lit_fedad.methods.scaffold import ScaffoldClient, ScaffoldServer

METHODS = {
    "fedavg": (FedAvgClient, FedAvgServer, {}),
    "local_buffers": (FedAvgClient, FedAvgServer, {"aggregate_buffers": "local"}),
    "fedprox": (FedProxClient, FedAvgServer, {"mu": 0.5}),
    "scaffold": (ScaffoldClient, ScaffoldServer, {"learning_rate": 0.05}),
    "moon": (MoonClient, FedAvgServer, {"mu": 2.0, "projection": 4}),
    "fedbn": (FedBNClient, FedBNServer, {}),
    "local": (LocalClient, FedAvgServer, {}),
    "fedphp": (FedPHPClient, FedAvgServer, {"rounds": 3, "weight": 0.5}),
    "dbe": (DBEClient, FedAvgServer, {}),
    "apfl": (APFLClient, FedAvgServer, {"alpha": 0.4}),
    "apple": (AppleClient, AppleServer, {"rounds": 3, "relation_learning_rate": 0.05}),
    "fednova": (FedNovaClient, FedNovaServer, {}),
    "feddyn": (FedDynClient, FedDynServer, {}),
    "ditto": (DittoClient, FedAvgServer, {}),
    "pfedme": (PFedMeClient, FedAvgServer, {"inner_steps": 2}),
    "fedrep": (FedRepClient, FedAvgServer, {"head_epochs": 2, "base_epochs": 1}),
}
HEADLESS = {**METHODS}
del HEADLESS["fedrep"]  # a memory bank has no head to keep
AVERAGING = {**METHODS}
del AVERAGING["apple"]  # keeps every client's model, and averages none
ALIKE = {**AVERAGING}
del ALIKE["dbe"]  # sends a mean of features down besides
del ALIKE["fednova"]  # sends a number of steps up besides
REPLACING = {**AVERAGING}
del REPLACING["fednova"]  # goes several mean steps
del REPLACING["feddyn"]  # corrects the mean


@pytest.fixture(params=METHODS)
def play(request, federate):
    """Plays one of the methods."""
    client_class, server_class, client = METHODS[request.param]

    def play(task, data, **settings):
        return federate(client_class, server_class, task=task, data=data, client=client, **settings)

    return play


# -------------------------------------------------------------------------------- going on where it ended


@pytest.mark.slow
def test_interrupted_runs_end_as_uninterrupted_ones(play, make_classifier, make_points, exactly):
    """Shuffled batches, half of the clients a round, every interruption possible."""
    data = {client: make_points(4 + 2 * client, seed=client) for client in range(3)}

    def run(**more):
        return play(make_classifier(), data, fraction=0.67, shuffle=True, **more)

    exactly(outcome(restarted(run, 2, 3)), outcome(run()))


@pytest.mark.parametrize("play", AVERAGING, indirect=True)
def test_a_client_that_takes_no_part_keeps_its_own(play, make_classifier, make_points, exactly):
    """One of two clients a round: the first keeps what it has, the other what it began with."""
    data = {client: make_points(4 + 2 * client, seed=client) for client in range(2)}
    one, two = (play(make_classifier(), data, rounds=rounds, fraction=0.5) for rounds in (1, 2))
    (present,), (later,) = (report.participants for report in two.history[-2:])
    assert present != later
    exactly(two.pool.get(present), one.pool.get(present))
    exactly(one.pool.get(later), one.pool.initial)


# ------------------------------------------------------------------------------- banks follow the weights


@pytest.mark.parametrize("play", HEADLESS, indirect=True)
def test_the_bank_that_scores_was_made_with_the_model_that_scores(play, make_task, make_loader, exactly):
    """A bank that holds every patch is the features; DBE's bias moves them."""
    data = {client: make_loader(3, client) for client in range(2)}
    parts = {"reduce": SampleReduce(), "slots": 3 * 16, "learning_rate": 0.05}
    for report in play(make_task(**parts), data).history:
        for client, predicts in (report.metrics or {}).items():
            task = make_task(**parts)
            task.load_state_dict({n: e for n, e in predicts.items() if n.startswith("head.")}, strict=False)
            with torch.no_grad():
                features = torch.cat([task(batch).flatten(0, 1) for batch in data[client]])
            exactly(predicts["memory"], features + predicts.get("offset", 0))


# --------------------------------------------------------------------------------- measuring is looking


@pytest.mark.slow
def test_evaluation_changes_nothing(play, make_classifier, make_points, exactly):
    data = {client: make_points(4 + 2 * client, seed=client) for client in range(3)}
    settings = {"fraction": 0.67, "shuffle": True}
    often = play(make_classifier(), data, evaluate_every=1, **settings)
    seldom = play(make_classifier(), data, evaluate_every=3, **settings)
    exactly(outcome(often)[:2], outcome(seldom)[:2])
    exactly(often.history[-1].metrics, seldom.history[-1].metrics)


@pytest.mark.slow
@pytest.mark.parametrize("play", HEADLESS, indirect=True)
def test_evaluating_a_trained_run_again_changes_nothing(play, make_task, make_loader, exactly):
    federation = play(make_task(), {0: make_loader(5), 1: make_loader(3, seed=1)})
    before = outcome(federation)
    exactly(federation.evaluate(3), federation.history[-1].metrics)
    exactly(outcome(federation), before)


# ---------------------------------------------------------------------------------- who the clients are


@pytest.mark.parametrize("play", REPLACING, indirect=True)
def test_one_client_is_its_own_mean(play, make_classifier, make_points, tap):
    """The server holds, bit for bit, what the client sent."""
    weights = play(make_classifier(), {0: make_points(6)}, channel=tap).server.weights
    sent = tap.uploads(3)[0]
    assert all(torch.equal(entry, sent[name]) for name, entry in weights.items())


@pytest.mark.parametrize("play", AVERAGING, indirect=True)
def test_identical_clients_are_one_client(play, make_classifier, make_points, exactly):
    """Bit for bit: equal float32 weights, averaged in double precision, come back as they are."""
    many = play(make_classifier(), {client: make_points(6) for client in range(3)}, rounds=2)
    one = play(make_classifier(), {0: make_points(6)}, rounds=2)
    of_many, of_one = ({**state_of(played.server), "clients": None} for played in (many, one))
    exactly(of_many, of_one)
    exactly(many.history[-1].metrics[2], one.history[-1].metrics[0])


@pytest.mark.parametrize("play", AVERAGING, indirect=True)
def test_it_does_not_matter_who_holds_which_data(play, make_classifier, make_points, exactly):
    """Bit for bit, with batches in a fixed order: a random one belongs to the client's number.

    All shares are eighths, so that double precision sums float32 without rounding, in whatever order.
    """
    sizes = {0: 2, 1: 4, 2: 4, 3: 6}
    data = {client: make_points(size, seed=client) for client, size in sizes.items()}
    holders = {0: 2, 1: 3, 2: 0, 3: 1}
    here = play(make_classifier(), data, rounds=2)
    there = play(make_classifier(), {holders[client]: held for client, held in data.items()}, rounds=2)
    exactly(state_of(here.server), state_of(there.server))
    for client, holder in holders.items():
        exactly(here.pool.get(client), there.pool.get(holder))


@pytest.mark.slow
def test_a_client_without_data_has_no_effect(play, make_classifier, make_points, exactly):
    data = {0: make_points(4), 1: make_points(6, seed=1)}
    exactly(
        outcome(play(make_classifier(), {**data, 2: make_points(0)})), outcome(play(make_classifier(), data))
    )


# ------------------------------------------------------------------------------------------ what crosses


@pytest.mark.parametrize("play", HEADLESS, indirect=True)
def test_nothing_from_local_data_or_the_frozen_backbone_crosses(play, make_task, make_loader, tap):
    task = make_task()
    play(task, {0: make_loader(5), 1: make_loader(3, seed=1)}, channel=tap, rounds=1)
    assert not tap.names.intersection(task.local_buffers)
    assert not [name for name in tap.names if "backbone" in name]


@pytest.mark.parametrize("play", ["fedprox", "feddyn", "ditto", "pfedme", "apfl", "fedphp"], indirect=True)
def test_as_many_bytes_as_fedavg(play, federate, make_classifier, make_points):
    data = {0: make_points(4), 1: make_points(6, seed=1)}
    ours = play(make_classifier(), data, rounds=1).history[-1]
    average = federate(FedAvgClient, task=make_classifier(), data=data, rounds=1).history[-1]
    assert (ours.bytes_up, ours.bytes_down) == (average.bytes_up, average.bytes_down)


@pytest.mark.parametrize("play", ALIKE, indirect=True)
def test_what_crosses_is_as_declared(play, make_classifier, make_points, tap):
    """Names, shapes and types; both ways alike."""
    federation = play(make_classifier(), {0: make_points(4), 1: make_points(6, seed=1)}, channel=tap)
    down, up = federation.client.broadcast_spec(), federation.client.upload_spec()
    assert down == up
    for _, _, message in tap.sent:
        assert {name: (spec.shape, spec.dtype) for name, spec in up.items()} == {
            name: (tuple(entry.shape), entry.dtype) for name, entry in message.items()
        }
