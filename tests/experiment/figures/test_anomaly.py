"""The pictures of a run."""

import re
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers.calibrations import limits
from PIL import Image

from lit_fedad.contracts import Prediction
from lit_fedad.core.building import build
from lit_fedad.data.partition import Partition
from lit_fedad.evaluation.predict import Predicted
from lit_fedad.experiment.build import build_data, build_model, build_partition
from lit_fedad.experiment.federations import build_evaluator, build_federation
from lit_fedad.experiment.figures import history as history_figures
from lit_fedad.experiment.figures import predictions as calibration
from lit_fedad.experiment.run import Run
from lit_fedad.experiment.run_folder import RunFolder
from lit_fedad.federation.processes import make_fabric
from lit_fedad.federation.round_report import RoundReport
from lit_fedad.report.console import Display

pytestmark = pytest.mark.filterwarnings("ignore:.*RANDOM weights")


@pytest.fixture
def drawn(monkeypatch):
    """What is handed to the figures, by the name of the figure."""
    calls = {}
    figures = ("partition_figure", "stages_figure", "curves_figure", "heatmap_sheet")
    for name in (*figures, "lines_figure"):
        module = calibration if hasattr(calibration, name) else history_figures
        original = getattr(module, name)

        def record(*given, name=name, original=original, **named):
            calls.setdefault(name, []).append(given)
            return original(*given, **named)

        monkeypatch.setattr(module, name, record)
    return calls


@pytest.fixture(scope="module")
def restored(tiny_run):
    """The federation of the tiny run after its last round, its data, and a Fabric."""
    run = RunFolder(tiny_run)
    config, fabric = run.config(), make_fabric(accelerator="cpu")
    config["evaluation"]["pictures"] = 2
    images = build(config["data"])
    with pytest.warns(UserWarning, match="RANDOM"):
        model = build_model(config, images.categories)
    data = build_data(config, images, build_partition(config, images), model, fabric, Display(quiet=True))
    evaluator = build_evaluator(config, data, model.method, fabric)
    federation = build_federation(config, tiny_run, model, data.module, evaluator, fabric, data.digest)
    federation.resume()
    return federation, data, fabric


def run_of(federation, data, fabric, folder, pictures, calibration):
    config = {"evaluation": {"pictures": pictures, "alpha": 0.5}, "calibration": {"by": "client"}}
    display = Display(quiet=True)
    predictions = federation.predictions(federation.rounds)
    return Run(config, RunFolder(folder), None, data, federation, fabric, display, calibration, predictions)


def pictures(folder):
    found = {path.name: np.asarray(Image.open(path)) for path in (folder / "figures").iterdir()}
    assert all(image.std() > 1 for image in found.values()), "a blank picture"
    return set(found)


def test_a_run_leaves_all_pictures(tiny_run):
    curves = {"i_auroc.png", "p_auroc.png", "pro.png", "aupr.png"}  # no loss: nothing is trained
    others = {"partition.png", "communication.png", "heatmaps.png", "scores.png", "calibration.png"}
    assert pictures(tiny_run) == {*others, *curves}


def test_the_partition_shows_every_image(restored, drawn, tmp_path):
    _, data, _ = restored
    history_figures.draw_partition(data, tmp_path)
    counts, products = drawn["partition_figure"][0]
    assert counts.sum() == len(data.images.train)
    assert list(products) == list(data.images.categories)
    assert pictures(tmp_path) == {"partition.png"}
    assert "stages_figure" not in drawn


def test_images_that_come_task_after_task_are_drawn_by_task(restored, drawn, tmp_path):
    _, data, _ = restored
    products = [sample.category for sample in data.images.train]
    partition = Partition.in_stages([[[0], [1, len(products) - 1]], [[2]]])
    history_figures.draw_partition(replace(data, partition=partition), tmp_path)
    ((counts, names),) = drawn["stages_figure"]
    expected = [[[0], [1, -1]], [[2]]]
    assert [own.tolist() for own in counts] == [
        [[sum(products[i] == name for i in task) for name in names] for task in own] for own in expected
    ]
    assert pictures(tmp_path) == {"partition.png"}
    assert "partition_figure" not in drawn


def test_curves_join_what_was_measured(drawn, tmp_path):
    def report(number, loss=None, auroc=None):
        metrics = {"i_auroc": {"mean": 0.5, "per_client": auroc}} if auroc else None
        per_client = {client: {"loss": value, "other": 9.0} for client, value in (loss or {}).items()}
        return RoundReport(number, "train", [0, 1], per_client=per_client, metrics=metrics)

    history = [
        report(0, auroc={0: 0.5, 1: 0.6}),
        report(1, {1: 2.0}),
        report(2, {0: 3.0, 1: 1.0}, {0: 0.7, 1: 0.8}),
    ]
    history_figures.draw_curves(history, tmp_path)
    assert drawn["curves_figure"] == [
        ({0: [(0, 0.5), (2, 0.7)], 1: [(0, 0.6), (2, 0.8)]}, "I-AUROC"),
        ({1: [(1, 2.0), (2, 1.0)], 0: [(2, 3.0)]}, "training loss"),
    ]
    assert pictures(tmp_path) == {"i_auroc.png", "loss.png"}


def test_accuracy_is_drawn_over_all_that_was_sent(drawn, tmp_path):
    def report(number, sent, value=None):
        metrics = None if value is None else {"accuracy": {"mean": value}}
        return RoundReport(number, "train", [0, 1], bytes_up=sent, metrics=metrics)

    history = [
        report(0, {0: 5, 1: 6}, float("nan")),
        report(1, {0: 100, 1: 200}, 0.5),
        report(2, {1: 50}),
        report(3, {}, 0.75),
    ]
    history_figures.draw_communication(history, "accuracy", tmp_path)
    assert [given[0] for given in drawn["lines_figure"]] == [
        {"mean over clients": [[(0.000311, 0.5), (0.000361, 0.75)]]}
    ]
    assert pictures(tmp_path) == {"communication.png"}


def test_where_nothing_is_sent_there_is_no_such_picture(tmp_path):
    silent = RoundReport(1, "train", [0], bytes_up={0: 0}, metrics={"accuracy": {"mean": 0.5}})
    history_figures.draw_communication([silent], "accuracy", tmp_path)
    history_figures.draw_communication([RoundReport(1, "train", [0], bytes_up={0: 9})], "accuracy", tmp_path)
    assert not (tmp_path / "figures").exists()


def test_nothing_measured_draws_nothing(tmp_path):
    history_figures.draw_curves([RoundReport(0, "memory", [0])], tmp_path)
    assert not (tmp_path / "figures").exists()


@pytest.mark.slow
def test_the_largest_clients_cases_with_their_p_values(restored, drawn, tmp_path):
    federation, data, fabric = restored
    sizes = data.partition.sizes
    largest = int(np.argmax(sizes))
    calibration.draw_heatmaps(
        run_of(federation, data, fabric, tmp_path, 2, limits({largest: 5.25, 1 - largest: 99.0}))
    )
    cases, title = drawn["heatmap_sheet"][0]
    assert len(cases) == 4
    assert title.startswith(f"Client {largest} on textures")
    assert title.endswith("(anomalous: p at most 0.5)")
    for case in cases:  # of one calibration image, p is 1/2 above it and else 1
        score, p_value = re.search(r"score (\S+), p = (\S+)$", case.caption).groups()
        assert float(p_value) == (0.5 if float(score) > 5.3 else 1)
    best = cases[0]
    assert best.image.shape == (32, 32, 3)
    assert best.mask.shape == best.anomaly_map.shape == (32, 32)
    assert pictures(tmp_path) == {"heatmaps.png"}


def test_a_task_that_does_not_localise_has_no_heatmaps(restored, monkeypatch, tmp_path):
    federation, data, fabric = restored
    monkeypatch.setattr(
        federation.client, "predict_step", lambda batch: Prediction(batch["image"].flatten(1).mean(1))
    )
    federation.evaluate(federation.rounds)
    calibration.draw_heatmaps(run_of(federation, data, fabric, tmp_path, 1, limits({})))
    monkeypatch.undo()
    federation.evaluate(federation.rounds)
    assert not (tmp_path / "figures").exists()


def test_scores_of_the_largest_clients_beside_what_they_ship(restored, monkeypatch, tmp_path):
    federation, data, fabric = restored
    labels = torch.tensor([sample.label for sample in data.images.test])
    scores = torch.arange(len(labels)).float()
    run = run_of(federation, data, fabric, tmp_path, 2, limits({0: 5.25}))
    run.predictions = {1: Predicted(scores + 1), 0: Predicted(scores)}
    given = []
    original = calibration.client_scores_figure
    monkeypatch.setattr(
        calibration, "client_scores_figure", lambda clients: given.append(clients) or original(clients)
    )
    calibration.draw_scores(run)
    (clients,) = given
    assert list(clients) == [0, 1]
    assert clients[0].threshold == pytest.approx(5.25, rel=1e-3)
    assert clients[0].counts.tolist() == [1]
    assert np.isinf(clients[1].threshold)  # it has no calibration scores
    for client, own in clients.items():
        assert own.normal.tolist() == (scores + client)[labels == 0].tolist()
        assert own.anomalous.tolist() == (scores + client)[labels == 1].tolist()
    assert pictures(tmp_path) == {"scores.png"}


def test_a_process_that_is_not_the_first_draws_nothing(restored, drawn, tmp_path):
    federation, data, fabric = restored
    elsewhere = SimpleNamespace(clients=federation.clients, rounds=2, predictions=lambda round: {})
    calibration.draw_heatmaps(run_of(elsewhere, data, fabric, tmp_path, 1, limits({})))
    assert drawn == {}


def test_pictures_of_earlier_decisions_do_not_stay(restored, tmp_path):
    folder = tmp_path / "figures"
    folder.mkdir()
    for name in ("calibration.png", "scores.png", "heatmaps.png", "partition.png"):
        (folder / name).touch()
    calibration.Predictions().on_rounds_end(run_of(*restored, tmp_path, 0, limits({})))
    assert [path.name for path in folder.iterdir()] == ["partition.png"]
