"""How clients are judged whose images come task after task: against brute force, on models whose answers are drawn."""

import itertools
import math
import os

import numpy as np
import pytest
import torch
from helpers.encoder import FlatEncoder
from helpers.methods import federation_of
from helpers.stream_oracle import (
    COUNTS,
    KINDS,
    LABELS,
    SERVER,
    TESTS,
    Oracle,
    OracleServer,
    answers,
    make_module,
)
from lightning.fabric import Fabric

from lit_fedad.core.errors import UserError
from lit_fedad.evaluation.accuracy_stream import StreamAccuracyEvaluator
from lit_fedad.federation.sampling import ClientSampler
from lit_fedad.methods.fedavg import FedAvgClient, FedAvgServer
from lit_fedad.tasks.classifier import Classifier


@pytest.fixture
def play(tmp_path, monkeypatch):
    """Plays oracles on the stream; attributes of the client by name."""
    # Else, waiting for the disk takes most of the time.
    monkeypatch.setattr(os, "fsync", lambda handle: None)

    def play(
        rounds=6, until=None, folder="run", fraction=0.67, client_test="own", schedule="stage_major", every=1,
        client=None, server=None, module=None, counts=COUNTS, **attributes,
    ):  # fmt: skip
        client = client or Oracle()
        for name, value in attributes.items():
            setattr(client, name, value)
        module = module or make_module(rounds, counts, schedule)
        fabric = Fabric(accelerator="cpu", devices=1)
        judge = StreamAccuracyEvaluator(module.test_dataloader(), module, counts, client, fabric, client_test)
        federation = federation_of(
            client,
            server or OracleServer(),
            tmp_path / folder,
            data=module,
            evaluator=judge,
            fabric=fabric,
            rounds=until or rounds,
            sampler=ClientSampler(fraction),
            evaluate_every=every,
        )
        if folder != "parts":  # else nobody goes on
            monkeypatch.setattr(federation, "save", lambda round: None)
        federation.run()
        return federation

    return play


# -------------------------------------------------------------------------------------------------- brute force


def accuracy(model, kind, weights, known=None) -> float:
    """Of a model's answers to test images, an image of class k counting weights[k] over the images of its class."""
    total = right = 0.0
    logits = answers(kind, *model).numpy()
    for row, label in zip(logits, LABELS.numpy(), strict=True):
        open_to = [k for k in range(KINDS) if known is None or known[k]]
        weight = weights[label] / np.sum(LABELS.numpy() == label)
        total += weight
        right += weight * (max(open_to, key=lambda k, row=row: row[k]) == label)
    return right / total


def expected(federation, round, client_test="own", server=lambda client: SERVER) -> dict:
    """By metric and client, NaN where there is none."""
    module, participants = federation.data, {r.round: r.participants for r in federation.history}
    found = {}
    for client, ending in itertools.product(range(3), ("", "_masked", "_second")):
        kind = int(ending == "_second")
        held = COUNTS[client]
        weights = (held > 0).astype(int) if client_test == "balanced" else held

        def judged(model, stage, rows, weights=weights, held=held, kind=kind, ending=ending):
            known = held[: stage + 1].sum(0) > 0 if ending == "_masked" else None
            return accuracy(model, kind, weights[rows].sum(0), known)

        def so_far(model, stage, judged=judged):
            return judged(model, stage, slice(stage + 1))

        last = {}  # the last round of each task in which the client took part, in this turn of the tasks
        for played in range(1, round + 1):
            if client in participants[played]:
                stage = module.stage(client, played)
                last = {s: at for s, at in last.items() if s < stage} | {stage: played}
        own = {f"{name}{ending}": math.nan for name in
               ("selection_accuracy", "local_accuracy", "incremental_accuracy", "forgetting")}  # fmt: skip
        own[f"global_accuracy{ending}"] = so_far((server(client), round), module.stage(client, round))
        if last:
            latest = max(last, key=last.get)
            own[f"local_accuracy{ending}"] = so_far((client, last[latest]), latest)
            own[f"incremental_accuracy{ending}"] = np.mean(
                [so_far((client, at), s) for s, at in last.items()]
            )
            drops = []
            for j in range(latest):
                before = [
                    judged((client, at), s, slice(j, j + 1)) for s, at in last.items() if j <= s < latest
                ]
                if before:
                    drops.append(max(before) - judged((client, last[latest]), latest, slice(j, j + 1)))
            if drops:
                own[f"forgetting{ending}"] = np.mean(drops)
            if client in participants[round]:
                own[f"selection_accuracy{ending}"] = own[f"local_accuracy{ending}"]
        for name, value in own.items():
            found.setdefault(name, {})[client] = value
    return found


def assert_same(metrics, wanted, names=None) -> None:
    assert metrics.keys() == wanted.keys()
    for name in names or wanted:
        for client, value in wanted[name].items():
            assert metrics[name]["per_client"][client] == pytest.approx(value, nan_ok=True), (name, client)


@pytest.mark.parametrize(("fraction", "client_test"), [(1.0, "own"), (0.34, "balanced")])
def test_every_round_by_brute_force(play, fraction, client_test):
    federation = play(fraction=fraction, client_test=client_test)
    assert {len(report.participants) for report in federation.history} == {3 if fraction == 1 else 1}
    for report in federation.history:
        assert_same(report.metrics, expected(federation, report.round, client_test))


def test_the_cases_are_telling(play):
    """Clients that skip the last round, and a whole task; values that differ."""
    federation = play(fraction=0.34)
    metrics = federation.history[-1].metrics
    (present,) = federation.history[-1].participants
    assert [c for c, v in metrics["selection_accuracy"]["per_client"].items() if not math.isnan(v)] == [
        present
    ]
    trained = [
        {federation.data.stage(c, r.round) for r in federation.history if c in r.participants}
        for c in range(3)
    ]
    assert any(0 < len(stages) < len(own) for stages, own in zip(trained, COUNTS, strict=True))
    for ending in ("", "_masked", "_second"):
        values = [metrics[f"{name}{ending}"]["mean"] for name in ("global_accuracy", "local_accuracy")]
        assert len(set(values)) == 2
    assert metrics["local_accuracy"]["mean"] < metrics["local_accuracy_masked"]["mean"]


@pytest.mark.slow
def test_rounds_without_evaluation_change_nothing_of_those_with_one(play):
    """Scores of the last visits before an evaluation, among them the end of each task, are all that is needed."""
    often, seldom = play(folder="a"), play(folder="b", every=100)
    due = {r.round: r.metrics for r in seldom.history if r.metrics}
    assert set(due) == {2, 3, 4, 6}
    for report in often.history:
        if report.round in due:
            assert_same(due[report.round], expected(often, report.round))


@pytest.mark.slow
def test_tasks_that_come_again(play):
    """Every round of the last ten turns is judged; of each stage the last visit counts."""
    federation = play(schedule="literal", every=6, fraction=1.0)
    for report in federation.history:
        assert_same(report.metrics, expected(federation, report.round))


def test_summary_over_clients(play):
    federation = play(fraction=1.0)
    metrics, sizes = federation.history[2].metrics, {}
    for client in range(3):
        sizes[client] = COUNTS[client][: federation.data.stage(client, 3) + 1].sum()
    for name, found in metrics.items():
        known = {c: v for c, v in found["per_client"].items() if not math.isnan(v)}
        if not known:
            continue
        assert found["mean"] == pytest.approx(np.mean(list(known.values())))
        assert found["worst"] == (max if name.startswith("forgetting") else min)(known.values())
        pooled = sum(sizes[c] * v for c, v in known.items()) / sum(sizes[c] for c in known)
        assert found["pooled"] == pytest.approx(pooled)
    assert math.isnan(federation.history[0].metrics["forgetting"]["mean"])


def test_metrics_are_named_in_order_and_all_of_them_are_given(play):
    federation = play(rounds=3)
    names = federation.evaluator.metrics
    assert names[0] == "selection_accuracy"
    assert len(names) == 15
    assert set(names) == set(federation.history[-1].metrics)


# --------------------------------------------------------------------------------------------- the server's model


@pytest.mark.slow
def test_a_model_for_all_is_asked_for_once(play):
    asked = []

    class Counting(Oracle):
        def predict_step(self, batch):
            asked.append(self.model)
            return super().predict_step(batch)

    each, once = play(folder="a"), play(folder="b", client=Counting(), alike=True)
    assert sum(who == SERVER for who, _ in asked) == 6 * math.ceil(TESTS / 7)
    for one, other in zip(each.history, once.history, strict=True):
        np.testing.assert_equal(one.metrics, other.metrics)


@pytest.mark.slow
def test_the_server_s_model_may_differ_at_each_client(play):
    federation = play(differ=True)
    for report in federation.history:
        assert_same(report.metrics, expected(federation, report.round, server=lambda client: 10 + client))


@pytest.mark.parametrize("alike", [True, False])
@pytest.mark.slow
def test_without_models_of_their_own_the_server_s_is_that_of_the_participants(play, alike):
    federation = play(own_model=False, alike=alike, fraction=0.67)
    assert federation.evaluator.after_fit
    for report in federation.history:
        for ending in ("", "_masked", "_second"):
            shared = report.metrics[f"global_accuracy{ending}"]["per_client"]
            selected = report.metrics[f"selection_accuracy{ending}"]["per_client"]
            assert {c for c, v in selected.items() if not math.isnan(v)} == set(report.participants)
            local = report.metrics[f"local_accuracy{ending}"]["per_client"]
            assert all(map(math.isnan, local.values()))
            for client in report.participants:
                assert selected[client] == shared[client]
            own = expected(federation, report.round)[f"global_accuracy{ending}"]
            assert shared == {client: pytest.approx(value) for client, value in own.items()}
        assert set(report.trained) == set(report.participants)


@pytest.mark.slow
def test_merged_models_are_those_of_all_clients_on_what_the_server_sent(play):
    federation = play(merged_model=True, differ=True, fraction=0.34)
    for report in federation.history:
        wanted = expected(federation, report.round)  # SERVER stands for what was received
        for ending in ("", "_masked", "_second"):
            assert_same(
                {"local": report.metrics[f"local_accuracy{ending}"]},
                {"local": wanted[f"global_accuracy{ending}"]},
            )
            selected = report.metrics[f"selection_accuracy{ending}"]["per_client"]
            assert {c for c, v in selected.items() if not math.isnan(v)} == set(report.participants)
        assert report.metrics["local_accuracy"] != report.metrics["global_accuracy"]
        assert set(report.trained) == {0, 1, 2}


# ---------------------------------------------------------------------------------------------- going on, looking on


@pytest.mark.parametrize("models", [{}, {"own_model": False}, {"merged_model": True}])
@pytest.mark.slow
def test_interrupted_runs_are_judged_as_uninterrupted_ones(play, models):
    whole = play(folder="whole", **models)
    for until in (1, 5):
        module = make_module(6)
        play(folder="parts", until=until, module=module, **models)
    parts = play(folder="parts", **models)
    assert [report.round for report in parts.history] == [1, 2, 3, 4, 5, 6]
    for one, other in zip(parts.history, whole.history, strict=True):
        np.testing.assert_equal(one.metrics, other.metrics)
    # And a finished run may be judged again.
    np.testing.assert_equal(play(folder="parts", **models).evaluate(6), whole.history[-1].metrics)


# --------------------------------------------------------------------------------------------------- a real method


def test_one_client_of_fedavg_is_the_server(play):
    """In one task: what it has just trained is what the server makes of it."""
    counts = [np.array([[4, 6, 5, 5]])]
    torch.manual_seed(0)
    client = FedAvgClient(Classifier(FlatEncoder(), KINDS, augment=False, learning_rate=0.1))
    server = FedAvgServer(client)
    module = make_module(3, counts, side=2)
    history = play(3, client=client, server=server, module=module, counts=counts).history
    for report in history:
        for ending in ("", "_masked"):
            found = [report.metrics[f"{name}_accuracy{ending}"] for name in
                     ("global", "local", "selection", "incremental")]  # fmt: skip
            assert all(summary == found[0] for summary in found)
            assert math.isnan(report.metrics[f"forgetting{ending}"]["mean"])
    assert len({report.metrics["global_accuracy"]["mean"] for report in history}) > 1


def test_unknown_test_classes_are_refused_in_one_line(play):
    with pytest.raises(UserError, match=r"^evaluation.client_test=bogus: give own or balanced$"):
        play(client_test="bogus")


# ----------------------------------------------------------------------------------------------- looking at no image


@pytest.mark.parametrize("client_test", ["own", "balanced"])
def test_constant_predictions_are_judged_as_models_are(play, client_test):
    """As an oracle that gives the client's largest class so far to every image, in the metric that judges models."""
    federation = play(fraction=1.0, client_test=client_test)
    for report in federation.history:
        found = federation.evaluator.constants(report)
        largest, common = [], []
        held = [COUNTS[c][: federation.data.stage(c, report.round) + 1].sum(0) for c in range(3)]
        for client, own in enumerate(held):
            rows = COUNTS[client][: federation.data.stage(client, report.round) + 1]
            weights = own if client_test == "own" else (rows > 0).sum(0)
            largest.append(weights[own.argmax()] / weights.sum())
            common.append(weights[sum(held).argmax()] / weights.sum())
        assert found["client_largest"]["global_accuracy"] == pytest.approx(np.mean(largest))
        assert found["global_largest"]["local_accuracy"] == pytest.approx(np.mean(common))
        assert all(len(set(values.values())) == 1 for values in found.values())


def test_constant_predictions_are_judged_on_the_clients_that_a_metric_is_of(play):
    """A_sel is of the round's one participant, A_glo of all; the largest class of all is that of all in either."""
    federation = play(fraction=0.34)
    for report in federation.history:
        found = federation.evaluator.constants(report)
        held = [COUNTS[c][: federation.data.stage(c, report.round) + 1].sum(0) for c in range(3)]
        (client,) = report.participants
        own, common = held[client], sum(held).argmax()
        assert found["client_largest"]["selection_accuracy"] == pytest.approx(own.max() / own.sum())
        assert found["global_largest"]["selection_accuracy"] == pytest.approx(own[common] / own.sum())
        assert found["client_largest"]["global_accuracy"] == pytest.approx(
            np.mean([one.max() / one.sum() for one in held])
        )


def test_a_class_without_test_images_has_no_weight(play):
    federation = play(fraction=1.0)
    judge, report = federation.evaluator, federation.history[-1]
    held = [COUNTS[c][: federation.data.stage(c, report.round) + 1].sum(0) for c in range(3)]
    untested = held[0].argmax()
    tested = [np.where(np.arange(len(own)) == untested, 0, own) for own in held]
    judge.test_images = judge.test_images * (torch.arange(len(held[0])) != int(untested))
    expected = [
        weights[own.argmax()] / weights.sum()
        for own, weights in zip(held, tested, strict=True)
        if weights.any()
    ]
    found = judge.constants(report)["client_largest"]["global_accuracy"]
    assert found == pytest.approx(np.mean(expected))
    assert 0 in expected
