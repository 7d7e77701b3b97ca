"""The round loop on a method small enough to play by hand."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import save

from lit_fedad.contracts import Exchanges, Predictors, TensorSpec
from lit_fedad.errors import UserError
from lit_fedad.federation import local_training as loop_training
from lit_fedad.federation.client_pool import ClientPool
from lit_fedad.federation.local_training import Train
from lit_fedad.federation.sampling import ClientSampler


def by_hand(rounds: int) -> list[float]:
    """One step of 0.5 for client 0 (target 1), three for client 1 (target 4), averaged 1 : 3."""
    w, path = 0.0, []
    for _ in range(rounds):
        first = w + 0.5 * (1 - w)
        second = w
        for _ in range(3):
            second += 0.5 * (4 - second)
        w = 0.25 * first + 0.75 * second
        path.append(w)
    return path


def test_golden_numbers(toy):
    history = toy().run()
    assert [r.scalars["weight"] for r in history] == pytest.approx(by_hand(3), rel=1e-6)
    assert history[0].scalars["loss"] == pytest.approx((1 * 0.5 + 3 * (8 + 2 + 0.5) / 3) / 4)


def test_identical_clients_are_one_client(toy, tmp_path):
    many = toy(values={c: [2.0, 2.0] for c in range(4)}, folder=tmp_path / "many").run()
    one = toy(values={0: [2.0, 2.0]}, folder=tmp_path / "one").run()
    assert [r.scalars["weight"] for r in many] == [r.scalars["weight"] for r in one]


def test_client_order_does_not_matter(toy, tmp_path):
    values = {0: [1.0, 3.0], 1: [5.0, 0.5, 2.0], 2: [7.0]}
    forward = toy(values=values, folder=tmp_path / "a").run()
    backward = toy(values=dict(reversed(values.items())), folder=tmp_path / "b").run()
    assert [r.scalars for r in forward] == [r.scalars for r in backward]


def test_a_client_without_data_has_no_effect(toy, tmp_path):
    values = {0: [1.0], 1: [4.0, 4.0, 4.0]}
    with_empty = toy(values={**values, 2: []}, folder=tmp_path / "a").run()
    without = toy(values=values, folder=tmp_path / "b").run()
    assert [r.scalars for r in with_empty] == [r.scalars for r in without]


def test_resumed_equals_uninterrupted(toy, tmp_path):
    values = {0: [1.0, 3.0], 1: [5.0, 0.5, 2.0], 2: [7.0, 1.0]}
    settings = {"values": values, "sampler": ClientSampler(fraction=0.67)}
    whole = toy(folder=tmp_path / "whole", rounds=6, **settings).run()
    for stop in range(1, 6):
        history = toy(folder=tmp_path / "parts", rounds=stop, **settings).run()
    history = toy(folder=tmp_path / "parts", rounds=6, **settings).run()
    assert [r.scalars for r in history] == [r.scalars for r in whole]
    assert history[-1].metrics == whole[-1].metrics  # personal states too: visits of each client


def test_a_checkpoint_half_written_is_ignored(toy, tmp_path):
    toy(rounds=2).run()
    partial = tmp_path / "checkpoints" / ".partial_100003"
    partial.mkdir()
    (partial / "server.pt").write_bytes(b"half")
    assert [r.round for r in toy(rounds=3).run()] == [1, 2, 3]


def test_another_configuration_is_refused(toy, tmp_path):
    toy(rounds=1).run()
    federation = toy(rounds=2)
    federation.checkpoints.identity = "other"
    with pytest.raises(UserError, match=f"{tmp_path}.*another configuration"):
        federation.run()


def test_a_failing_client_stops_the_run_in_one_line(toy):
    with pytest.raises(UserError, match=r"^round 2, client 1: RuntimeError: the disk is full$"):
        toy(fails={(2, 1)}).run()


def test_a_failing_client_is_left_out(toy):
    history = toy(fails={(2, 1)}, sampler=ClientSampler(on_failure="skip")).run()
    first = by_hand(1)[0]
    assert history[1].participants == [0]
    assert history[1].scalars["weight"] == pytest.approx(first + 0.5 * (1 - first))
    assert history[1].warnings == ["round 2: client 1 left out: RuntimeError: the disk is full"]


def test_too_few_clients_left(toy):
    with pytest.raises(UserError, match="1 clients finished, min_clients=2.*client 1"):
        toy(fails={(1, 1)}, sampler=ClientSampler(on_failure="skip", min_clients=2)).run()


def test_a_non_finite_update_names_client_and_tensor(toy):
    federation = toy()
    send = federation.client.send
    federation.client.send = lambda loader: {
        "w": send(loader)["w"] / (0 if federation.client.context.client == 1 else 1)
    }
    with pytest.raises(UserError, match="round 1, client 1.*'w'.*not finite"):
        federation.run()


def test_a_loss_that_is_not_finite_names_the_client(toy):
    with pytest.raises(UserError, match="round 1, client 1: the loss is not finite"):
        toy(values={0: [1.0], 1: [float("nan")]}).run()


def test_bytes_are_those_of_the_serialised_messages(toy):
    from safetensors.torch import save

    report = toy(rounds=1).run()[0]
    size = len(save({"w": torch.zeros(1)}))
    assert report.bytes_up == {0: size, 1: size} == report.bytes_down
    assert report.elements_up == {0: 1, 1: 1}


def test_personal_states_that_do_not_fit_go_to_disk(toy, tmp_path):
    pool = ClientPool({"x": torch.zeros(0)}, tmp_path / "personal", memory_bytes=100)
    for client in range(5):
        pool.put(client, {"x": torch.full((20,), float(client))})
    assert len(list((tmp_path / "personal").glob("*.pt"))) >= 3
    assert [float(pool.get(c)["x"][0]) for c in range(5)] == [0, 1, 2, 3, 4]
    (tmp_path / "checkpoint").mkdir()
    pool.save(tmp_path / "checkpoint", None)
    other = ClientPool({}, tmp_path / "elsewhere")
    other.restore(tmp_path / "checkpoint", {1, 3})
    assert [float(other.get(c)["x"][0]) for c in (1, 3)] == [1, 3]
    assert other.get(2) == {}


def test_unchanged_states_are_linked_not_written(toy, tmp_path):
    pool = ClientPool({}, tmp_path / "personal")
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    pool.put(0, {"x": torch.ones(1)})
    pool.put(1, {"x": torch.ones(1)})
    pool.save(folders[0], None)
    pool.put(1, {"x": torch.zeros(1)})
    pool.save(folders[1], folders[0])
    same = [(f / "client_00000.pt").stat().st_ino for f in folders]
    changed = [(f / "client_00001.pt").stat().st_ino for f in folders]
    assert same[0] == same[1]
    assert changed[0] != changed[1]


def test_a_stored_state_does_not_follow_the_live_model(tmp_path):
    live = torch.ones(3)
    pool = ClientPool({"x": live}, tmp_path)
    pool.put(0, {"x": live})
    live.zero_()
    assert pool.get(0)["x"].sum() == 3 == pool.get(7)["x"].sum()


def test_evaluation_rounds(toy):
    history = toy(rounds=5, evaluate_every=2).run()
    assert [r.round for r in history if r.metrics] == [2, 4, 5]


def test_nothing_to_play_is_refused_at_once(toy):
    with pytest.raises(UserError, match="rounds=0: this method does nothing before round 1"):
        toy(rounds=0)


# --------------------------------------------------------------------------------- several exchanges a round


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
        return {"spread": TensorSpec((None,))}

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
        loop_training, "fit", lambda client, *rest: fitted.append(client.context.exchange) or {"loss": 0.0}
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
        assert [c for e, c in visited if e == 0][
            -3:
        ] == report.participants  # the first come from an evaluation
    assert len({tuple(report.participants) for report in history}) > 1


def test_who_fails_in_the_first_exchange_is_left_out_of_the_second(spread):
    federation = spread(fails={(2, 1, "train")}, sampler=ClientSampler(on_failure="skip"))
    history = federation.run()
    assert history[1].participants == [0]
    assert history[1].warnings == ["round 2: client 1 left out: RuntimeError: the disk is full"]
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
    assert report.warnings == ["round 1: client 1 left out: RuntimeError: the disk is full"]


def test_a_failure_in_the_second_exchange_may_stop_the_run(spread):
    with pytest.raises(UserError, match="^round 1, client 0: RuntimeError: the disk is full$"):
        spread(fails={(1, 0, "spread")}).run()


def test_every_visit_of_every_exchange_is_counted(spread):
    counted = []
    counter = SimpleNamespace(on_client_end=lambda done, total: counted.append((done, total)))
    spread(rounds=2, evaluate_every=2, callbacks=[counter]).run()
    total = 2 * 2 * 2 + 2  # clients, exchanges and rounds; one evaluation
    assert counted == [(number, total) for number in range(1, total + 1)]


# --------------------------------------------------------------------------- images that come task after task


STREAM = {0: [[1.0], [3.0, 3.0, 3.0]], 1: [[4.0, 4.0, 4.0], [2.0]]}


class Stream:
    """Clients hold their first list of numbers for two rounds, then their second."""

    sizes = {client: sum(map(len, tasks)) for client, tasks in STREAM.items()}
    milestones = frozenset({2})

    def at(self, round):
        stage = int(round > 2)
        held = type(self.plain)({client: tasks[stage] for client, tasks in STREAM.items()})
        return Now(held, dict.fromkeys(STREAM, stage))

    def __init__(self, plain):
        self.plain = plain


class Now:
    def __init__(self, held, stages):
        self.held, self.stages, self.sizes = held, stages, held.sizes

    def client_loader(self, *given, **options):
        return self.held.client_loader(*given, **options)


@pytest.fixture
def stream(toy):
    """The tiny method on tasks that come one after another; ``seen`` is where its client was refreshed."""

    def make(**parts):
        federation = toy(**{"rounds": 4, **parts})
        federation.data = Stream(federation.data)
        client = federation.client
        client.seen = []
        client.refresh = lambda loader: client.seen.append(
            (client.context.round, client.context.client, client.context.stage, len(loader.dataset))
        )
        return federation

    return make


def test_a_round_has_the_images_of_its_task_and_their_number_weighs(stream):
    """Of four images a round, client 0 holds one, then three."""
    w, path = 0.0, []
    for round in range(1, 5):
        own = []
        for tasks in STREAM.values():
            numbers, v = tasks[round > 2], w
            for x in numbers:
                v += 0.5 * (x - v)
            own.append((len(numbers), v))
        w = sum(n * v for n, v in own) / 4
        path.append(w)
    history = stream().run()
    assert [report.scalars["weight"] for report in history] == pytest.approx(path, rel=1e-6)
    # In round 3, client 0 takes three steps from w to 3, and client 1 one to 2.
    w = path[1]
    losses = 3 * [np.mean([(0.5**k * (w - 3)) ** 2 / 2 for k in range(3)])] + [(w - 2) ** 2 / 2]
    assert history[2].scalars["loss"] == pytest.approx(np.mean(losses), rel=1e-5)


def test_contexts_say_the_task(stream):
    federation = stream(rounds=3, evaluate_every=10)
    federation.run()
    first = [(round, client, 0, len(STREAM[client][0])) for round in (1, 2) for client in (0, 1)]
    # Evaluation after round 2 sees what is sent for round 3, and the task of round 2.
    after = [(3, client, 0, len(STREAM[client][0])) for client in (0, 1)]
    last = [(round, client, 1, len(STREAM[client][1])) for round in (3, 4) for client in (0, 1)]
    assert federation.client.seen == [*first, *after, *last]


def test_the_last_rounds_of_tasks_are_evaluated(stream):
    history = stream(rounds=5, evaluate_every=4).run()
    assert [report.round for report in history if report.metrics] == [2, 4, 5]


# ------------------------------------------------------------------------------------ scored when just trained


@pytest.fixture
def after_fit(toy):
    """The tiny method, of which clients are scored with what they have just trained: their weight and visits."""

    def make(**parts):
        federation = toy(**parts)
        federation.evaluator.after_fit = True
        return federation

    return make


def test_clients_are_scored_with_what_they_have_just_trained(after_fit):
    history = after_fit().run()
    for w, report in zip([0.0, *by_hand(2)], history, strict=True):
        second = 4 + 0.5**3 * (w - 4)
        assert report.trained == {
            0: (pytest.approx(w + 0.5 * (1 - w)), report.round), 1: (pytest.approx(second), report.round)
        }  # fmt: skip


def test_nobody_is_scored_who_trains_again_before_the_next_evaluation(after_fit):
    values = {client: [float(client)] for client in range(6)}
    parts = {"values": values, "sampler": ClientSampler(fraction=0.5), "rounds": 7}
    history = after_fit(**parts, evaluate_every=4).run()
    for due in ([1, 2, 3, 4], [5, 6, 7]):
        reports = [report for report in history if report.round in due]
        last = {client: report.round for report in reports for client in report.participants}
        assert [set(r.trained) for r in reports] == [
            {c for c, at in last.items() if at == r.round} for r in reports
        ]
        assert any(at < due[-1] for at in last.values())


def test_a_score_of_what_was_trained_leaves_no_trace(toy, after_fit, tmp_path):
    plain = toy(folder=tmp_path / "a").run()
    federation = after_fit(folder=tmp_path / "b")

    def deploy(which="own"):
        if federation.client.context.round <= federation.rounds:  # what predicts after the last round is kept
            federation.client.task.w.data.zero_()
            federation.client.visits = 0

    federation.client.deploy = deploy
    history = federation.run()
    assert all(report.trained == {0: (0.0, 0), 1: (0.0, 0)} for report in history)
    assert [r.scalars for r in history] == [r.scalars for r in plain]
    assert [federation.pool.get(client)["visits"] for client in (0, 1)] == [3, 3]


def test_without_a_model_of_its_own_no_client_is_scored(toy, after_fit, tmp_path, monkeypatch):
    federation = after_fit(folder=tmp_path / "a")
    monkeypatch.setattr(type(federation.client), "predictors", Predictors(own=False))
    assert [report.trained for report in federation.run()] == [{}, {}, {}]
    assert [report.trained for report in toy(folder=tmp_path / "b").run()] == [{}, {}, {}]


def test_who_fails_is_not_scored(after_fit):
    history = after_fit(fails={(2, 1)}, sampler=ClientSampler(on_failure="skip")).run()
    assert [set(report.trained) for report in history] == [{0, 1}, {0}, {0, 1}]


def test_scores_are_kept_in_the_checkpoint(after_fit):
    first = after_fit(rounds=2).run()
    again = after_fit(rounds=3).run()
    assert [report.trained for report in again[:2]] == [report.trained for report in first]


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
