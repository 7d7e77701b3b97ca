"""The pictures of runs on semantic anomalies, and the report on privacy."""

import csv
import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers.calibrations import limits
from helpers.damage import forge
from PIL import Image
from torch.utils.data import DataLoader

from lit_fedad.audits import distance_correlation as density_privacy
from lit_fedad.audits.distance_correlation import distance_correlation_matrix
from lit_fedad.contracts import Context
from lit_fedad.contracts.state import state_of
from lit_fedad.core.config import compose
from lit_fedad.deployment.predict import predict
from lit_fedad.evaluation.calibration import with_calibration
from lit_fedad.evaluation.predict import image_scores
from lit_fedad.experiment.build import (
    build_data,
    build_images,
    build_model,
    build_partition,
    build_public,
)
from lit_fedad.experiment.federations import build_evaluator, build_federation
from lit_fedad.experiment.figures import capacities
from lit_fedad.experiment.figures import predictions as semantic
from lit_fedad.experiment.figures.predictions import Predictions
from lit_fedad.experiment.finished_run import load_client
from lit_fedad.experiment.run import Run
from lit_fedad.experiment.run_folder import RunFolder
from lit_fedad.experiment.train import train
from lit_fedad.federation.evaluator import LocalQuery
from lit_fedad.federation.processes import make_fabric
from lit_fedad.methods.fadngs import LastMerge
from lit_fedad.report.console import Display

SMALL = [
    *(
        "experiment=semantic_small",
        "features=train",
        "rounds=2",
        "warmup=1",
        "distillation.queue=32",
        "encoder.channels=4",
    ),
    *("data.train_per_class=16", "data.test_per_class=5", "data.train_per_set=2", "data.test_per_set=8"),
    *("partition.clients=3", "partition.size=14", "partition.contamination=0", "batch_size=8"),
    *("evaluation.every=2", "tracking=off", "fabric.accelerator=cpu"),
]
# Without the loss's factor: at so few images it leads to densities so narrow that rounding decides.
GENTLE = ["task.loss.base_temperature=null", "task.warmup_loss.base_temperature=null"]
FADNGS = ["method=fadngs", *SMALL, *GENTLE, "public.count=10", "method.server.distillation.epochs=1"]
ALL = {"representations.png", "scores.png", "capacities.png", "distance_correlation.png"}
REPORTS = {
    "representations_figure": semantic,
    "score_boxes_figure": capacities,
    "correlation_figure": density_privacy,
}


@pytest.fixture
def drawn(monkeypatch):
    """What is handed to the figures, by the name of the function; nothing is drawn."""
    calls = {}
    for name, module in REPORTS.items():
        monkeypatch.setattr(module, name, lambda *given, name=name: calls.update({name: given}))
        monkeypatch.setattr(module, "save_figure", lambda figure, path: None)
    monkeypatch.setattr(semantic, "tsne_layout", lambda features: features)
    return calls


def run_of(federation, data, fabric, folder, calibration, alpha):
    """What callbacks are handed after the last round."""
    config = {"evaluation": {"pictures": 1, "alpha": alpha}}
    model = SimpleNamespace(task=federation.client.task)
    parts = model, data, federation, fabric, Display(quiet=True)
    return Run(config, RunFolder(folder), *parts, calibration, federation.predictions(federation.rounds))


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Folder and result of a FADngs run."""
    folder = tmp_path_factory.mktemp("fadngs")
    return folder, train(compose([*FADNGS, f"out={folder}"]), quiet=True)


def played(out, *overrides):
    """A federation after its last round that still knows what was merged in it; its data; and a Fabric."""
    config, fabric = compose([*overrides, f"out={out}"]), make_fabric(accelerator="cpu")
    images = build_images(config)
    model = build_model(config, images.categories, build_public(config, images))
    partition = with_calibration(config, images, build_partition(config, images), model.method)
    data = build_data(config, images, partition, model, fabric, Display(quiet=True))
    evaluator = build_evaluator(config, data, model.method, fabric)
    federation = build_federation(config, out, model, data.module, evaluator, fabric, data.digest)
    federation.run()
    return federation, data, fabric


@pytest.fixture(scope="module")
def played_fadngs(tmp_path_factory):
    return played(tmp_path_factory.mktemp("played"), *FADNGS, "task.clusters=2")


def pictures(folder):
    return {path.name for path in (folder / "figures").glob("*.png")}


def raw_scores(embedded, densities):
    """Mahalanobis distances to the nearest of some densities, by the book."""
    inverses = [(mean.double(), torch.linalg.inv(cov.double())) for mean, cov in densities]
    gaps = [
        ((embedded.double() - mean) @ inverse * (embedded.double() - mean)).sum(1)
        for mean, inverse in inverses
    ]
    return torch.stack(gaps).amin(0)


def laid_out(data):
    """Positions of normal test images of classes that a client holds, then of anomalies."""
    held = data.partition.counts(data.images).sum(0) > 0
    labels = data.images.test_labels.numpy()
    return np.concatenate([np.flatnonzero((labels < 10) & held[labels]), np.flatnonzero(labels >= 10)])


def embed(task, images):
    with torch.no_grad():
        return task.project(task.encoder((images / 255 - task.mean) / task.std))


@pytest.mark.slow
def test_a_run_leaves_its_pictures_and_its_report(finished):
    folder, result = finished
    assert pictures(folder) >= ALL
    report = json.loads((folder / "figures" / "distance_correlation.json").read_text())
    assert report["images"] == 3 * 11  # of 14 that each client holds, three calibrate
    assert report["names"][:3] == ["raw data", "shared densities", "Gaussian 1"]
    for name in ("r_squared", "r", "corrected"):
        assert result["privacy"][f"shared_raw_{name}"] == report[name][0][1]
        assert result["privacy"][f"noise_raw_{name}"] == report[name][0][2]
    assert all(np.asarray(Image.open(folder / "figures" / name)).std() > 1 for name in ALL)


@pytest.mark.slow
def test_a_run_continued_after_its_last_round_has_all_pictures_again(finished, drawn):
    folder, result = finished
    text = (folder / "result.json").read_text()
    (folder / "result.json").unlink()
    try:
        again = train(compose([*FADNGS, f"out={folder}"]), quiet=True)
    finally:
        forge(folder, "result.json", text)
    assert again["privacy"] == result["privacy"]
    assert drawn.keys() == set(REPORTS)
    assert list(drawn["score_boxes_figure"][0]) == ["global"]  # local models are not kept


@pytest.mark.slow
def test_no_pictures_where_none_are_wanted(drawn, tmp_path):
    assert (
        train(compose([*FADNGS, "rounds=1", "evaluation.pictures=0", f"out={tmp_path}"]), quiet=True)[
            "privacy"
        ]
        is None
    )
    assert drawn == {}


@pytest.mark.parametrize(
    "overrides", [["method=fedavg", "task=contrastive"], ["method=local", "task=contrastive"]]
)
@pytest.mark.slow
def test_clients_that_share_no_densities_have_one_decision_and_no_report(overrides, drawn, tmp_path):
    federation, data, fabric = played(tmp_path, *overrides, "contrastive_loss=crad", *SMALL)
    run = run_of(federation, data, fabric, tmp_path, limits(dict.fromkeys(federation.clients, 1.0)), 0.5)
    for callback in (Predictions(), density_privacy.MeasureDensities()):
        callback.on_rounds_end(run)
    assert run.extras == {}
    assert drawn.keys() == {"representations_figure"}
    features, _, _, alone, _, judge = drawn["representations_figure"]
    assert features.shape == (len(laid_out(data)), 128)
    assert alone is None
    assert judge == "decisions of client 0"


@pytest.mark.slow
def test_any_task_with_features_is_laid_out(drawn, tmp_path):
    federation, data, fabric = played(
        tmp_path,
        "method=fedavg",
        "task=autoencoder",
        *SMALL,
        "rounds=1",
        "encoder.depth=18",
        "task.decoder.channels=16",
    )
    semantic.show_representations(run_of(federation, data, fabric, tmp_path, limits({0: 0.0}), 0.5))
    features, owners, decisions, *_ = drawn["representations_figure"]
    task = federation.client.task
    with torch.no_grad():
        expected = task({"image": data.images.test_images[laid_out(data)] / 255})
    torch.testing.assert_close(features, expected, rtol=1e-4, atol=1e-5)
    assert decisions.all()  # errors are above 0
    assert len(owners) == len(features)


def test_owners_decisions_and_those_of_one_client_alone(played_fadngs, drawn, tmp_path):
    federation, data, fabric = played_fadngs
    semantic.show_representations(run_of(federation, data, fabric, tmp_path, limits({0: 150.0, 1: 0.0}), 0.5))
    features, owners, decisions, alone, number, judge = drawn["representations_figure"]
    assert (number, judge) == (0, "global densities")
    holding = data.partition.counts(data.images)[:, :10]
    labels = data.images.test_labels[laid_out(data)]
    assert 24 < len(labels) < 74
    assert owners.tolist() == [-1 if label >= 10 else int(holding[:, label].argmax()) for label in labels]
    federation.ask(federation.rounds, LocalQuery("client", lambda client, _: client), [0])
    task = federation.client.task
    torch.testing.assert_close(
        features, embed(task, data.images.test_images[laid_out(data)]), rtol=1e-4, atol=1e-5
    )
    shared = federation.server.auxiliary
    assert len(shared["densities.mean"]) == 6
    scores = raw_scores(features, zip(shared["densities.mean"], shared["densities.covariance"], strict=True))
    decided = (scores - 150.0).abs() > 0.2  # nearer, rounding decides
    assert decisions[decided].tolist() == (scores[decided] > 150.0).tolist()
    own = federation.server.last[0]
    own = list(zip(own["densities.mean"], own["densities.covariance"], strict=True))
    held_out = raw_scores(embed(task, data.images.train_images[list(data.partition.calibration[0])]), own)
    limit = float(held_out.sort().values[int(np.ceil((len(held_out) + 1) * 0.5)) - 1])
    by_hand = raw_scores(features, own)
    decided = (by_hand - limit).abs() > 2e-3 * limit
    assert alone[decided].tolist() == (by_hand[decided] > limit).tolist()
    assert 0 < alone.sum() < len(alone)


@pytest.mark.slow
def test_every_model_is_judged_by_densities_of_its_own_kind(played_fadngs, drawn, tmp_path):
    federation, data, fabric = played_fadngs
    capacities.show_capacities(federation, data, fabric, tmp_path)
    scores, clients = drawn["score_boxes_figure"]
    assert clients == [0, 1, 2]
    assert list(scores) == ["averaged", "global", "local"]
    chosen = capacities._test_images_by_client(federation, data)
    dominant = data.partition.counts(data.images)[:, :10].argmax(1)
    for client, (normal, anomalous) in chosen.items():
        assert (data.images.test_labels[normal] == dominant[client]).all()
        assert len(normal) == 5
        assert len(anomalous) == 8
    dealt = torch.cat([anomalous for _, anomalous in chosen.values()])
    assert sorted(dealt.tolist()) == (data.images.test_labels >= 10).nonzero()[:, 0].tolist()

    def by_hand(client, _):
        task, (averaged, local) = client.task, federation.server.last_merge
        found = {}
        for name, weights in {"averaged": averaged, "global": federation.server.weights, **local}.items():
            task.load_state_dict(weights, strict=False)
            found[name] = (
                [
                    (
                        task.estimate(
                            embed(task, data.images.train_images[list(indices)]),
                            Context(federation.seed, federation.rounds, c),
                        )
                    )
                    for c, indices in enumerate(data.partition.clients)
                ],
                [[embed(task, data.images.test_images[part]) for part in chosen[c]] for c in range(3)],
            )
        return found

    found = federation.ask(federation.rounds, LocalQuery("by hand", by_hand), [0])[0]
    for client in range(3):
        for name, model, judges in (
            ("averaged", "averaged", range(3)),
            ("global", "global", range(3)),
            ("local", client, [client]),
        ):
            densities, parts = found[model]
            joined = [
                pair for c in judges for pair in zip(densities[c].mean, densities[c].covariance, strict=True)
            ]
            for score, z in zip(scores[name][client], parts[client], strict=True):
                torch.testing.assert_close(score.double(), raw_scores(z, joined), rtol=2e-3, atol=1e-2)


def test_without_distillation_there_is_no_second_global_model(played_fadngs, drawn, tmp_path, monkeypatch):
    federation, data, fabric = played_fadngs
    server = federation.server
    monkeypatch.setattr(server, "last_merge", LastMerge(server.weights, {1: server.weights}))
    capacities.show_capacities(federation, data, fabric, tmp_path)
    scores = drawn["score_boxes_figure"][0]
    assert list(scores) == ["global", "local"]
    # Client 1 alone took part in the last round.
    assert [[len(part) for part in pair] for pair in scores["local"]] == [[0, 0], [5, 8], [0, 0]]


def test_images_stand_behind_the_density_they_are_nearest_to(played_fadngs, drawn, tmp_path, monkeypatch):
    federation, data, fabric = played_fadngs
    given = []
    original = density_privacy.density_privacy
    monkeypatch.setattr(
        density_privacy, "density_privacy", lambda *args: given.append(args) or original(*args)
    )
    monkeypatch.setattr(density_privacy, "_MAX_IMAGES_EACH", 10)
    report = density_privacy.report_privacy(federation, data, fabric, tmp_path)
    means, covariances, raw, _ = given[0]
    federation.ask(federation.rounds, LocalQuery("client", lambda client, _: client), [0])
    assert len(means) == len(raw) == 6
    assert [len(raw[2 * c]) + len(raw[2 * c + 1]) for c in range(3)] == [10, 10, 10]
    for place, images in enumerate(raw):
        z, other = embed(federation.client.task, images), place ^ 1  # densities come in pairs
        mine, others = (raw_scores(z, [(means[k], covariances[k])]) for k in (place, other))
        assert (mine <= others * (1 + 1e-4) + 1e-3).all()
    table = drawn["correlation_figure"][1]
    assert report["shared_raw_r_squared"] == float(table[0, 1])
    assert report["shared_raw_r"] == pytest.approx(report["shared_raw_r_squared"] ** 0.5)
    assert json.loads((tmp_path / "distance_correlation.json").read_text())["images"] == 30
    assert distance_correlation_matrix([torch.cat(raw).flatten(1)] * 2)[0, 1] == pytest.approx(1)


def test_the_server_keeps_the_models_of_the_last_round_alone(played_fadngs):
    server = played_fadngs[0].server
    assert server.last_merge.averaged is not server.weights
    assert list(server.last_merge.local) == [0, 1, 2]
    sizes = torch.tensor([14.0, 14.0, 14.0]) / 42
    name = "projection.0.weight"
    mean = sum(size * server.last_merge.local[c][name] for c, size in enumerate(sizes))
    torch.testing.assert_close(server.last_merge.averaged[name], mean)
    assert set(state_of(server)) == {"weights", "statistics", "server_optimizer_state", "auxiliary", "last"}


@pytest.mark.slow
def test_a_folder_of_images_is_judged_as_the_test_set_is(finished, tmp_path):
    """Files of the run's own size score as in memory; others are brought to it; no heatmap is drawn."""
    folder, _ = finished
    images = build_images(RunFolder(folder).config())
    (tmp_path / "in").mkdir()
    for place in (0, 60):
        Image.fromarray(images.test_images[place].permute(1, 2, 0).numpy()).save(
            tmp_path / "in" / f"{place:02}.png"
        )
    Image.new("RGB", (50, 40), "red").save(tmp_path / "in" / "wide.jpg")
    with predict(str(folder), str(tmp_path / "in"), client=1, out=str(tmp_path / "out")).open() as file:
        rows = list(csv.DictReader(file))
    threshold = float(rows[0]["threshold"])
    assert [row["decision"] for row in rows] == [
        "anomalous" if float(row["score"]) > threshold else "normal" for row in rows
    ]
    assert [row["heatmap"] for row in rows] == ["", "", ""]
    assert [path.name for path in (tmp_path / "out").glob("[!.]*")] == ["scores.csv"]
    config, fabric = RunFolder(folder).config(), make_fabric(accelerator="cpu")
    model = build_model(config, images.categories)
    load_client(model, folder, config, 1, fabric)
    data = build_data(config, images, build_partition(config, images), model, fabric, Display(quiet=True))
    loader = DataLoader([data.module.test.__getitems__([0, 60])], batch_size=None)
    expected = image_scores(model.client, loader, fabric)
    assert [float(row["score"]) for row in rows[:2]] == pytest.approx(expected.tolist(), rel=1e-3)


@pytest.mark.slow
def test_two_processes_draw_what_one_draws(tmp_path):
    """Without distillation, which the first process does with every core while the others wait."""
    for devices in ("1", "2"):
        overrides = [
            *FADNGS,
            "method.server.distillation=null",
            f"fabric.devices={devices}",
            f"out={tmp_path / devices}",
        ]
        train(compose(overrides), quiet=True)
    for name in ALL:
        one, two = ((tmp_path / devices / "figures" / name).read_bytes() for devices in ("1", "2"))
        assert one == two, name
