"""The round loop with several exchanges a round."""

from types import SimpleNamespace

import pytest
import torch
from helpers.toy_federation import by_hand
from safetensors.torch import save

from lit_fedad.contracts import Client, Exchanges, Free, Server, Task, TensorSpec
from lit_fedad.contracts.disclosure import TRAINED_WEIGHTS
from lit_fedad.core.client_names import NUMBERS
from lit_fedad.core.errors import UserError
from lit_fedad.federation.client_runner import Train
from lit_fedad.federation.evaluator import LocalQuery
from lit_fedad.federation.sampling import ClientSampler


@pytest.mark.parametrize("listed", [None, Train(), Train, [Train()], (Train,)])
@pytest.mark.parametrize("name", ["setup", "rounds"])
def test_exchanges_are_tuples_of_exchanges(name, listed):
    with pytest.raises(TypeError, match=f"Exchanges: {name}=.* must be a tuple of exchanges"):
        Exchanges(**{name: listed})


def test_rounds_without_an_exchange_are_refused():
    with pytest.raises(ValueError, match="leave it out if clients only receive"):
        Exchanges(rounds=())


@pytest.mark.parametrize(
    ("part", "name", "arguments"),
    [
        (Client, "receive", ({},)),
        (Client, "broadcast_spec", ()),
        (Client, "send", ([],)),
        (Client, "upload_spec", ()),
        (Server, "broadcast", (0,)),
        (Server, "aggregate", ({},)),
        (Task, "forward", ({},)),
        (Task, "objective", (None, {})),
        (Task, "predict", (None, {})),
    ],
)
def test_what_an_own_class_lacks_is_named(part, name, arguments):
    own = type("Own", (part,), {})
    made = own(Task()) if part is Client else own()
    with pytest.raises(NotImplementedError, match=f"Own has no method {name}; define it"):
        getattr(made, name)(*arguments)


@pytest.fixture
def spread(toy):
    """The tiny method with a second exchange a round: clients send how far the merged weight is from their numbers."""

    def make(**parts):
        federation = toy(**parts)
        federation.received, federation.begun = [], []
        federation.exchanges = Exchanges((), (Heard(federation), Spread(federation)))
        return federation

    return make


class Heard(Train):
    """Training that notes where it was received, and may fail."""

    def __init__(self, federation):
        self.federation = federation

    def broadcast(self, server, client_id):
        self.federation.begun.append((server.context.round, server.context.exchange, self.name))
        return server.broadcast(client_id)

    def receive(self, client, message):
        client.receive(message)
        at = client.context
        self.federation.received.append((at.round, at.exchange, at.client, self.name))

    discloses = (TRAINED_WEIGHTS,)

    def send(self, client, loader):
        if (client.context.round, client.context.client, self.name) in client.fails:
            raise RuntimeError("the disk is full")
        return self.answer(client, loader)

    def answer(self, client, loader):
        return client.send(loader)


class Spread(Heard):
    name, trains = "spread", False

    def answer(self, client, loader):
        return {"spread": (torch.cat(list(loader)) - client.task.w.detach()).abs()}

    def upload_spec(self, client):
        return {"spread": TensorSpec((Free("clients"),))}

    def aggregate(self, server, updates):
        server.spread = {client: update.message["spread"] for client, update in updates.items()}
        server.diagnostics = lambda: {
            "weight": float(server.w),
            "widest": float(torch.cat(list(server.spread.values())).max()),
        }


def test_second_exchange_is_under_what_the_first_was_merged_to(spread):
    federation = spread()
    history = federation.run()
    path = by_hand(3)
    assert [r.scalars["weight"] for r in history] == pytest.approx(path, rel=1e-6)
    assert [r.scalars["widest"] for r in history] == pytest.approx(
        [max(abs(1 - w), abs(4 - w)) for w in path]
    )
    assert history[0].scalars["loss"] == pytest.approx((1 * 0.5 + 3 * (8 + 2 + 0.5) / 3) / 4)
    assert set(history[0].per_client[1]) == {"loss"}


def test_exchanges_are_numbered_and_clients_train_in_the_first(spread, monkeypatch):
    federation = spread(rounds=2, evaluate_every=2)
    fitted = []
    monkeypatch.setattr(
        Heard, "train", lambda self, client, *rest: fitted.append(client.context.exchange) or {"loss": 0.0}
    )
    federation.run()
    names = [(0, "train"), (1, "spread")]
    assert federation.received[:-2] == [(r, e, c, name) for r in (1, 2) for e, name in names for c in (0, 1)]
    assert federation.received[-2:] == [(3, 0, c, "train") for c in (0, 1)]  # evaluation
    assert fitted == [0] * 4
    begun = list(dict.fromkeys(federation.begun))
    assert begun == [*((r, e, name) for r in (1, 2) for e, name in names), (3, 0, "train")]


def test_bytes_of_all_exchanges_are_counted(spread):
    report = spread(rounds=1).run()[0]
    weight, one, three = (
        len(save({name: torch.zeros(n)})) for name, n in (("w", 1), ("spread", 1), ("spread", 3))
    )
    assert report.exchange == "train"
    assert report.bytes_up == {0: weight + one, 1: weight + three}
    assert report.bytes_down == {0: 2 * weight, 1: 2 * weight}
    assert report.elements_up == {0: 2, 1: 4}


def test_participants_of_a_round_are_those_of_all_its_exchanges(spread):
    values = {client: [float(client)] * 2 for client in range(6)}
    federation = spread(values=values, rounds=4, sampler=ClientSampler(fraction=0.5))
    history = federation.run()
    for report in history:
        visited = [(e, c) for r, e, c, _ in federation.received if r == report.round]
        assert [c for e, c in visited if e == 1] == report.participants
        # The first come from an evaluation.
        assert [c for e, c in visited if e == 0][-3:] == report.participants
    assert len({tuple(report.participants) for report in history}) > 1


def test_who_fails_in_the_first_exchange_is_left_out_of_the_second(spread):
    federation = spread(fails={(2, 1, "train")}, sampler=ClientSampler(on_failure="skip"))
    history = federation.run()
    assert history[1].participants == [0]
    assert history[1].lines(NUMBERS) == ["round 2: client 1 left out: RuntimeError: the disk is full"]
    assert history[1].failures == {1: "RuntimeError: the disk is full"}
    assert (2, 1, 1, "spread") not in federation.received
    assert history[1].bytes_up.keys() == {0}
    assert (3, 1, 1, "spread") in federation.received


def test_who_fails_in_the_second_exchange_has_taken_part_in_the_first(spread):
    federation = spread(fails={(1, 1, "spread")}, rounds=1, sampler=ClientSampler(on_failure="skip"))
    report = federation.run()[0]
    assert report.scalars["weight"] == pytest.approx(by_hand(1)[0])
    assert report.participants == [0]
    assert report.bytes_up[1] == len(save({"w": torch.zeros(1)}))
    assert federation.server.spread.keys() == {0}
    assert report.lines(NUMBERS) == ["round 1: client 1 left out: RuntimeError: the disk is full"]


def test_a_failure_in_the_second_exchange_may_stop_the_run(spread):
    with pytest.raises(UserError, match="^round 1, client 0: RuntimeError: the disk is full$"):
        spread(fails={(1, 0, "spread")}).run()


def test_every_visit_of_every_exchange_is_counted(spread):
    counted = []
    counter = SimpleNamespace(on_client_end=lambda done, total: counted.append((done, total)))
    spread(rounds=2, evaluate_every=2, callbacks=[counter]).run()
    total = 2 * 2 * 2 + 2  # clients, exchanges and rounds; one evaluation
    assert counted == [(number, total) for number in range(1, total + 1)]


def test_the_visits_of_a_question_after_the_rounds_are_counted_before_it_is_asked(spread):
    counted = []
    counter = SimpleNamespace(on_client_end=lambda done, total: counted.append((done, total)))
    federation = spread(rounds=1, callbacks=[counter])
    federation.run()
    visits = len(counted)
    federation.ask(1, LocalQuery("numbers", lambda client, number: number))
    assert counted[visits:] == [(visits + 1, visits + 2), (visits + 2, visits + 2)]


def test_only_the_first_exchange_is_scored(spread):
    federation = spread(rounds=1)
    federation.evaluator.after_fit = True
    scored, score = [], federation.evaluator.score
    federation.evaluator.score = lambda client, number: (
        scored.append((client.context.round, client.context.exchange)),
        score(client, number),
    )[1]
    federation.run()
    assert scored == [(1, 0)] * 2 + [(2, 0)] * 2


@pytest.mark.parametrize("rounds", [1, 2])
def test_clients_of_a_method_without_rounds_predict_with_what_its_server_broadcasts(toy, rounds):
    federation = toy(rounds=rounds)
    federation.exchanges = Exchanges((Train(),))
    history = federation.run()
    assert [report.metrics["w"]["mean"] for report in history] == pytest.approx(by_hand(1) * (rounds + 1))
    assert [report.bytes_up for report in history[1:]] == [{0: 0, 1: 0}] * rounds


def test_nothing_is_sent_in_idle_rounds_where_neither_class_has_a_message():
    idle = Exchanges().rounds[0]
    assert (idle.broadcast(Server(), 0), idle.broadcast_spec(Client(Task()))) == ({}, {})
    idle.receive(Client(Task()), {})
