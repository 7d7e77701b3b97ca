"""GLDP in a federation: what it comes down to, what crosses, what is kept, and tasks that come one after another."""

import os
from itertools import count

import pytest
import torch
from helpers.encoder import FlatEncoder
from helpers.methods import federation_of
from helpers.refusals import refusal
from lightning.fabric import Fabric
from torch.utils.data import DataLoader, Dataset

from lit_fedad.contracts import Context
from lit_fedad.contracts.state import state_of
from lit_fedad.data.stream import StreamDataModule
from lit_fedad.federation.client_runner import fit
from lit_fedad.federation.evaluator import Evaluation, Evaluator
from lit_fedad.federation.sampling import ClientSampler
from lit_fedad.methods import gldp
from lit_fedad.methods.fedavg import FedAvgServer
from lit_fedad.methods.fedrep import FedRepClient
from lit_fedad.methods.gldp import CLASSES, VECTORS, GLDPClient, GLDPServer
from lit_fedad.tasks.classifier import Classifier

EPOCHS = {"base_epochs": 1, "head_epochs": 2}
KINDS = 4
TASKS = [  # classes of each client's tasks; client 1 comes back to class 2
    [(0, 1), (1, 2), (0, 3)],
    [(1, 2), (0, 3), (2, 3)],
    [(0, 3), (1, 2), (0, 1)],
]


def make_task() -> Classifier:
    torch.manual_seed(0)
    return Classifier(FlatEncoder(), KINDS, augment=False, learning_rate=0.1)


def make_loader(labels, seed=0, batch_size=3) -> DataLoader:
    draw = torch.Generator().manual_seed(seed)
    data = [{"image": torch.randn(1, 2, 2, generator=draw) + label, "label": label} for label in labels]
    return DataLoader(data, batch_size)


class Images(Dataset):
    """Two hundred images of four classes in turn."""

    def __init__(self) -> None:
        draw = torch.Generator().manual_seed(0)
        self.labels = torch.arange(200) % KINDS
        self.images = torch.randn(200, 1, 2, 2, generator=draw) + self.labels[:, None, None, None]

    def __len__(self):
        return 200

    def __getitems__(self, indices):
        return {"image": self.images[indices], "label": self.labels[indices]}


TEST = Images().__getitems__(list(range(12)))


def make_stream(rounds, schedule="stage_major", sizes=(4, 5, 3)) -> StreamDataModule:
    """Client c has so many images of each class of each task, all different ones."""
    fresh = [iter(range(k, 200, KINDS)) for k in range(KINDS)]
    tasks = [
        [[next(fresh[k]) for k in own for _ in range(size)] for own in stages]
        for stages, size in zip(TASKS, sizes, strict=True)
    ]
    return StreamDataModule(Images(), Images(), tasks, rounds, schedule, batch_size=4)


class Asker(Evaluator):
    """What clients predict, and what they know."""

    def score(self, client, number):
        with torch.no_grad():
            prediction = client.predict_step(TEST)
        return {**prediction.others, "logits": prediction.logits}

    def evaluate(self, federation, round):
        return Evaluation(federation.ask(round, self, None, "server"))


@pytest.fixture
def play(tmp_path, monkeypatch):
    """Plays a stream: six rounds, two a task, unless said otherwise."""
    folders = (str(number) for number in count())
    monkeypatch.setattr(os, "fsync", lambda handle: None)

    def play(kind=GLDPClient, lam=0.5, server=None, rounds=6, folder=None, until=None, **parts):
        home = tmp_path / (folder or next(folders))
        settings = {"lam": lam} if kind is GLDPClient else {"base_first": True}
        client = kind(make_task(), **EPOCHS, **settings)
        given = {
            "server": server(client) if server else GLDPServer(client),
            "client": client,
            "data": make_stream(rounds),
            "evaluator": Asker(),
            "rounds": rounds,
            "evaluate_every": 100,
        }
        federation = federation_of(folder=home, **{**given, **parts})
        # Tasks last as long in a run that is stopped early.
        federation.rounds = until or rounds
        if folder is None:  # nobody goes on
            monkeypatch.setattr(federation, "save", lambda round: None)
        federation.run()
        federation.rounds = rounds
        return federation

    return play


def weights(federation):
    """What the server has learnt, and each client's head."""
    heads = {client: federation.pool.get(client)["own_entries"] for client in federation.clients}
    return federation.server.weights, heads


def plain(prototypes):
    return {"vectors": prototypes.vectors, "known": prototypes.known}


def outcome(federation):
    """All that a run leaves."""
    personal = {client: federation.pool.get(client) for client in federation.clients}
    for state in personal.values():
        state |= {name: plain(state[name]) for name in ("old", "current")}
    server = state_of(federation.server)
    history = [(r.scalars, r.participants, r.bytes_up, r.metrics) for r in federation.history]
    return server, personal, history


# ------------------------------------------------------------------------------------------- what it comes down to


def test_without_relations_it_is_fedrep_that_trains_the_base_first(play, exactly):
    own = play(lam=None, server=lambda client: GLDPServer(client, weighted=True), rounds=3)
    other = play(FedRepClient, server=FedAvgServer, rounds=3)
    exactly(weights(own), weights(other))
    assert [r.scalars["loss"] for r in own.history] == [r.scalars["loss"] for r in other.history]
    mean = play(lam=None, rounds=3)
    with pytest.raises(AssertionError):
        exactly(weights(mean), weights(other))


def test_with_clients_of_one_size_the_plain_mean_is_fedrep_s(play, exactly):
    parts = {"rounds": 3, "data": make_stream(3, sizes=(4, 4, 4))}
    own, other = play(lam=None, **parts), play(FedRepClient, server=FedAvgServer, **parts)
    exactly(weights(own), weights(other))


@pytest.mark.parametrize(("lam", "off"), [(1.0, "global_relation"), (0.0, "local_relation")])
@pytest.mark.slow
def test_lambda_switches_a_relation_off(play, exactly, monkeypatch, lam, off):
    """As if it were zero; the one that is left matters."""
    one = play(lam=lam, rounds=3)
    assert {"local_relation", "global_relation"} <= one.history[-1].scalars.keys()
    with monkeypatch.context() as patch:
        patch.setattr(gldp, off, lambda own, *_: 0 * own.sum())
        exactly(weights(play(lam=lam, rounds=3)), weights(one))
    with pytest.raises(AssertionError):
        exactly(weights(play(lam=None, rounds=3)), weights(one))


@pytest.mark.slow
def test_relations_act_once_there_is_something_to_relate_to(play, exactly):
    history = play().history
    local = [report.scalars["local_relation"] for report in history]
    shared = [report.scalars["global_relation"] for report in history]
    assert local[:2] == [0, 0]  # the first task
    assert min(local[2:]) > 0
    assert shared[0] == 0
    assert min(shared[1:]) > 0
    # So in the first task, the local relation alone is none.
    exactly(weights(play(lam=1.0, until=2)), weights(play(lam=None, until=2)))


def test_one_client_s_base_is_its_own_and_its_prototypes_are_the_global_ones(federate, exactly):
    loader, beta = make_loader([0, 1, 1, 2, 0]), 0.25
    sent = []
    played = federate(
        GLDPClient, GLDPServer, task=make_task(), data={0: loader}, client=EPOCHS, server={"beta": beta},
        question=lambda client, number: None,
        after_round=lambda federation, _: sent.append(federation.pool.get(0)["current"]),
    )  # fmt: skip
    expected = sent[0]
    for current in sent[1:]:
        expected = expected.moved(current, beta)
    torch.testing.assert_close(played.server.auxiliary, gldp.packed(expected))
    base = {
        name: entry for name, entry in played.client.task.state_dict().items() if "classifier" not in name
    }
    exactly(played.server.weights, base)


def test_order_of_clients_does_not_matter(federate):
    loaders = [make_loader([0, 1, 1, 2, 0], 1), make_loader([2, 3, 3], 2), make_loader([0, 3, 1, 1, 0], 3)]
    settings = {"client": EPOCHS, "question": lambda client, number: None}
    forward, backward = (
        federate(GLDPClient, GLDPServer, task=make_task(), data=dict(enumerate(order)), **settings)
        for order in (loaders, loaders[::-1])
    )
    torch.testing.assert_close(forward.server.weights, backward.server.weights)
    torch.testing.assert_close(forward.server.auxiliary, backward.server.auxiliary)
    for client in range(3):
        torch.testing.assert_close(
            forward.pool.get(client)["own_entries"], backward.pool.get(2 - client)["own_entries"]
        )


# ------------------------------------------------------------------------------------- what crosses, what is kept


def test_base_and_prototypes_cross_and_nothing_else(play, tap):
    played = play(channel=tap)
    base = {name for name in make_task().state_dict() if not name.startswith("classifier.")}
    assert tap.names == {*base, VECTORS, CLASSES}
    for round in range(1, 7):
        for client, message in tap.uploads(round).items():
            own = TASKS[client][(round - 1) // 2]
            assert message[CLASSES].tolist() == sorted(own)
            assert message[VECTORS].shape == (2, FlatEncoder.num_features)
    assert [report.scalars["classes_known"] for report in played.history] == [4] * 6
    down = [message[CLASSES].tolist() for _, client, message in tap.sent if client is None]
    assert down[0] == []
    assert down[1] == [0, 1, 2, 3]


def test_a_client_keeps_its_head_and_its_prototypes(play):
    played = play()
    for client in range(3):
        state = played.pool.get(client)
        assert set(state["own_entries"]) == {"classifier.weight", "classifier.bias"}
        assert state["stage"] == 2
        classes = [set(own) for own in TASKS[client]]
        assert set(state["current"].pack()[1].tolist()) == classes[2]
        assert set(state["old"].pack()[1].tolist()) == classes[0] | classes[1]


@pytest.mark.parametrize("schedule", ["stage_major", "literal"])
@pytest.mark.slow
def test_interrupted_streams_end_as_uninterrupted_ones(play, exactly, schedule):
    """With clients that skip rounds, and now and then a whole task."""
    parts = {"sampler": ClientSampler(fraction=0.34), "evaluate_every": 1}
    whole = play(**parts, data=make_stream(6, schedule))
    skipped = [
        set(range(3)) - {c for r in (a, a + 1) for c in whole.history[r].participants} for a in (0, 2, 4)
    ]
    assert any(skipped)
    for until in (1, 2, 5):
        play(**parts, folder="parts", until=until, data=make_stream(6, schedule))
    exactly(outcome(play(**parts, folder="parts", data=make_stream(6, schedule))), outcome(whole))


def test_evaluation_leaves_no_trace(play, exactly):
    """Also where it looks at clients that have skipped a whole task."""
    parts = {"sampler": ClientSampler(fraction=0.34)}
    often, seldom = play(**parts, evaluate_every=1), play(**parts, evaluate_every=6)
    exactly(outcome(often)[:2], outcome(seldom)[:2])
    before = outcome(often)[:2]
    exactly(often.evaluate(6), often.history[-1].metrics)
    exactly(outcome(often)[:2], before)


# --------------------------------------------------------------------------------------------- how it predicts


def test_prototypes_predict_the_classes_that_a_client_has_met_and_no_others(play):
    """So predictions restricted to these classes are the same."""
    played = play(evaluate_every=1)
    for report in played.history:
        stage = (report.round - 1) // 2
        for client, found in report.metrics.items():
            met = {k for own in TASKS[client][: stage + 1] for k in own}
            unknown = [k for k in range(KINDS) if k not in met]
            for logits in (found["lp"], found["logits"]):
                assert (logits[:, unknown] == -torch.inf).all()
                assert logits[:, sorted(met)].isfinite().all()
            assert torch.equal(found["logits"][:, sorted(met)], found["all"][:, sorted(met)])
            assert found["all"].isfinite().all()  # of all clients together
            assert found["head"].isfinite().all()


def test_at_first_the_head_predicts_and_after_the_first_fit_local_prototypes_do():
    client, loader = GLDPClient(make_task(), **EPOCHS).eval(), make_loader([0, 1, 1, 2, 0])
    with torch.no_grad():
        first = client.predict_step(TEST)
        assert torch.equal(first.logits, client.task.predict_step(TEST).logits)
        assert torch.equal(first.image_score, client.task.predict_step(TEST).image_score)
    assert torch.equal(first.others["lp"], first.logits)
    assert torch.equal(first.others["head"], first.logits)
    client.context = Context(0, 1, client=0)
    fit(client, loader, Fabric(accelerator="cpu", devices=1))
    client.send(loader)
    with torch.no_grad():
        found = client.predict_step(TEST)
    assert torch.equal(found.logits, found.others["head"])
    assert (found.others["lp"] == -torch.inf).any(0).tolist() == [False, False, False, True]
    assert set(found.others) == set(client.predictors.heads)


# --------------------------------------------------------------------------------------------------- settings


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"base_epochs": 3, "head_epochs": 3}, "base_epochs=3 must be at least 1 and below head_epochs=3"),
        ({"base_epochs": 0, "head_epochs": 3}, "base_epochs=0 must be at least 1"),
    ],
)
def test_bad_settings_are_refused_in_one_line(settings, said):
    with refusal(said):
        GLDPClient(make_task(), **settings)
