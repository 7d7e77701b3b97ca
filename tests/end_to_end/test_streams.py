"""Product types that come one after another on every client: detectors over whole runs."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
from torch.utils.data import DataLoader

from lit_fedad.contracts import Client
from lit_fedad.core.building import locate
from lit_fedad.core.config import compose
from lit_fedad.deployment.predict import evaluate, predict
from lit_fedad.evaluation.anomaly import AnomalyEvaluator
from lit_fedad.evaluation.decisions import RATES
from lit_fedad.experiment.train import train
from lit_fedad.federation.client_runner import Train
from lit_fedad.federation.loop import Federation
from lit_fedad.robust.aggregation import RobustAggregation

ROOT = os.environ.get("LIT_FEDAD_DATA")
METHODS = ("fedavg", "federated_bank", "local")
# Two of the five surfaces, two rounds each.
TWO = ("partition=products_in_turn", "partition.order=[gravel,grain]", "partition.clients=2", "rounds=4")
TASKS = ("i_auroc_task_1", "i_auroc_task_2")


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_products_come_in_turn(lab, method):
    out, result = lab.finished(f"method={method}", *TWO)
    assert json.loads((out / "result.json").read_text()) == json.loads(json.dumps(result))
    by_round = {int(round): values for round, values in result["metrics"].items()}
    assert list(by_round) == [0, 1, 2, 3, 4]
    for round, values in by_round.items():
        assert 0 <= values["i_auroc"] <= 1
        assert (values["i_auroc_task_2"] is None) == (values["forgetting"] is None) == (round <= 2)
    # With two tasks both are means of differences and of values, over clients as over tasks.
    first, last = by_round[2], by_round[4]
    assert first["i_auroc"] == first["i_auroc_task_1"]
    assert last["forgetting"] == pytest.approx(first["i_auroc_task_1"] - last["i_auroc_task_1"])
    assert last["incremental_i_auroc"] == pytest.approx((first["i_auroc"] + last["i_auroc"]) / 2)
    assert list(result["last"])[1:] == [
        *AnomalyEvaluator.metrics,
        *("incremental_i_auroc", "forgetting"),
        *TASKS,
        *RATES,
    ]
    counts = np.array(result["partition"]["counts"])
    # Of two images a surface, clients with models of their own hold one out.
    assert [(counts > 0).sum(), counts.sum()] == [4, 8 if method == "federated_bank" else 4]
    assert set(json.loads((out / "calibration.json").read_text())["clients"]) == {"0", "1"}


@pytest.mark.slow
def test_only_ends_of_tasks_are_needed(lab, differences):
    _, every = lab.finished("method=fedavg", *TWO)
    _, seldom = lab.finished("method=fedavg", *TWO, "evaluation.every=100")
    assert list(seldom["metrics"]) == ["0", "2", "4"]
    assert differences(every["last"], seldom["last"]) == []


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_clients_work_with_the_images_of_their_task_alone(lab, tmp_path, monkeypatch, method):
    """To train, to send, and to renew what they score with."""
    settings = (f"method={method}", *TWO)
    client = locate(lab.config(tmp_path / "run", *settings)["method"]["client"]["_target_"])
    seen = {}

    def watch(owner, name):
        original = getattr(owner, name)

        def watched(*given, **named):
            live = next(one for one in given if isinstance(one, Client))
            context, loader = live.context, next(one for one in given if isinstance(one, DataLoader))
            seen.setdefault((name, context.client, context.stage), set()).update(loader.dataset.indices)
            return original(*given, **named)

        monkeypatch.setattr(owner, name, watched)

    watch(client, "refresh")
    train = Train.train
    monkeypatch.setattr(Train, "train", lambda exchange, *given: train(*given))
    watch(Train, "train")
    watch(client, "send")
    lab.train(tmp_path / "run", *settings)
    stages = json.loads((tmp_path / "run" / "partition.json").read_text())["stages"]
    assert seen == {
        (name, number, stage): set(stages[number][stage])
        for name in ("refresh", "train", "send")
        for number in (0, 1)
        for stage in (0, 1)
    }


@pytest.mark.slow
def test_moments_that_a_rule_left_out_are_sent_again(lab, monkeypatch, tmp_path):
    """Else the client's next bank counts images that the server knows nothing of, and is refused ever after."""
    sent: list[list[bool]] = []

    def leave_one_out(rules, updates, spec, previous):
        if "count" not in spec:
            return updates, []
        sent.append([bool(len(updates[client].message["count"])) for client in (0, 1)])
        second = len(sent) == 5  # set-up, three rounds of the first product, now the second one's first
        return ({0: updates[0]}, [(1, "lies; left out")]) if second else (updates, [])

    monkeypatch.setattr(RobustAggregation, "__call__", leave_one_out)
    result = lab.train(
        tmp_path / "run", "method=federated_bank", *TWO, "rounds=6", "federation/robust=default"
    )
    nothing, both = [False, False], [True, True]
    assert sent == [both, nothing, nothing, nothing, both, [False, True], nothing]
    assert result["refused"] == {}


@pytest.mark.slow
def test_the_evaluate_command_finds_earlier_tasks_in_the_history(lab, differences):
    out, result = lab.finished("method=federated_bank", *TWO)
    evaluate(str(out))
    again = json.loads((out / "evaluation.json").read_text())
    assert differences(again, json.loads(json.dumps(result["last"]))) == []


@pytest.mark.slow
def test_the_predict_command_scores_images_of_every_task(lab, tmp_path):
    out, result = lab.finished("method=fedavg", *TWO)
    folder = Path(result["config"]["data"]["root"])
    images = next(folder.rglob("gravel/test"))
    scores = predict(str(out), str(images), out=str(tmp_path))
    assert len(scores.read_text().splitlines()) == 1 + len(list(images.rglob("*.png")))


AUTOENCODER = (
    "method=fedavg", "task=autoencoder", "encoder=convnet", "encoder.channels=8", "task.decoder.channels=8",
    "cache.enabled=false",
)  # fmt: skip


@pytest.mark.slow
def test_clients_that_predict_alike_are_judged_at_their_own_tasks(lab):
    """Client 0 sees gravel, then grain, client 1 the other way round; both are the one averaged autoencoder."""
    _, result = lab.finished(*AUTOENCODER, *TWO, "partition.rotate=true")
    own = [
        {name: result["last"][name]["per_client"][client] for name in ("i_auroc", *TASKS)} for client in "01"
    ]
    assert own[0]["i_auroc"] == own[1]["i_auroc"]
    assert own[0]["i_auroc_task_1"] == own[1]["i_auroc_task_2"]
    assert own[0]["i_auroc_task_2"] == own[1]["i_auroc_task_1"]
    assert result["first"]["i_auroc"]["per_client"] == result["first"]["i_auroc_task_1"]["per_client"]


@pytest.mark.slow
def test_classes_of_a_task_stream_are_products(lab):
    """One product a task, clients of one to three tasks; products may come back."""
    stream = ("partition=task_stream", "partition.clients=3", "partition.classes=1", "partition.stages=3")
    sizes = ("partition.min_stages=1", "partition.imbalance=1", "rounds=3")
    out, result = lab.finished("method=local", *stream, *sizes)
    tasks = json.loads((out / "partition.json").read_text())["stages"]
    for client, own in enumerate(tasks):
        for task in range(3):
            value = result["last"][f"i_auroc_task_{task + 1}"]["per_client"][str(client)]
            assert (value is not None and 0 <= value <= 1) == (task < len(own))
        assert (result["last"]["forgetting"]["per_client"][str(client)] is None) == (len(own) == 1)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["federated_bank", "fedavg"])
def test_a_run_interrupted_before_a_new_task_ends_like_an_uninterrupted_one(
    lab, tmp_path, monkeypatch, differences, outcome, method
):
    straight, expected = lab.finished(f"method={method}", *TWO)
    play = Federation.play

    def cut(self, round):
        if round == 3:
            raise KeyboardInterrupt
        return play(self, round)

    with monkeypatch.context() as patch:
        patch.setattr(Federation, "play", cut)
        with pytest.raises(KeyboardInterrupt):
            lab.train(tmp_path / "run", f"method={method}", *TWO)
    result = lab.train(tmp_path / "run", f"method={method}", *TWO)
    assert differences(outcome(result), outcome(expected)) == []
    assert differences(lab.state(tmp_path / "run"), lab.state(straight)) == []


@pytest.mark.slow
def test_two_processes_equal_one_bit_for_bit(lab, tmp_path, differences, outcome):
    given = ("method=local", "partition.rotate=true", *TWO)
    results = [lab.train(tmp_path / str(n), *given, f"fabric.devices={n}") for n in (1, 2)]
    assert differences(*map(outcome, results)) == []


@pytest.mark.slow
@pytest.mark.real_data
@pytest.mark.skipif(ROOT is None, reason="LIT_FEDAD_DATA names no folder")
@pytest.mark.parametrize("method", ["federated_bank", pytest.param("fedavg", marks=pytest.mark.nightly)])
def test_real_surfaces_come_in_turn(lab, tmp_path, method):
    (weights,) = (Path(ROOT).parent / "weights").glob("resnet18*.pth")
    few = ("data.train_per_product=12", "data.test_per_product=12", "rounds=3", "evaluation.pictures=0")
    overrides = (
        "experiment=anomaly_stream",
        f"method={method}",
        f"data.root={ROOT}",
        f"backbone.weights={weights}",
    )
    places = (f"out={tmp_path / 'run'}", f"cache.folder={lab.shared}", "tracking=off")
    result = train(compose([*overrides, *few, *places, "fabric.accelerator=cpu"]))
    assert result["partition"]["products"] == ["bottle", "screw", "magnetic_tile"]
    assert list(result["metrics"]) == ["0", "1", "2", "3"]
    # The first task is one product type alone.
    assert result["metrics"]["1"]["i_auroc"] == result["metrics"]["1"]["i_auroc_task_1"] > 0.8
    assert 0 <= result["last"]["i_auroc"]["mean"] <= 1
    assert -1 <= result["last"]["forgetting"]["mean"] <= 1
