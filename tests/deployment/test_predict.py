"""A trained run on new images and on its own test set."""

import csv
import errno
import functools
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from helpers.damage import forge, forge_config
from helpers.refusals import refusal
from helpers.trainers import plain_trainer
from PIL import Image
from sklearn.metrics import roc_auc_score

from lit_fedad.core.building import build
from lit_fedad.core.config import compose
from lit_fedad.core.errors import UserError
from lit_fedad.data import textures
from lit_fedad.data.datamodule import FederatedDataModule, ImageDataset
from lit_fedad.data.sample import Sample
from lit_fedad.data.transform import ImageTransform
from lit_fedad.deployment import predict as prediction
from lit_fedad.deployment.export import export
from lit_fedad.deployment.live_detector import OpenedClient
from lit_fedad.deployment.predict import evaluate, predict
from lit_fedad.deployment.watch import watch
from lit_fedad.experiment.build import build_model
from lit_fedad.experiment.claim import locked
from lit_fedad.experiment.datasets import image_transform
from lit_fedad.experiment.finished_run import load_client
from lit_fedad.experiment.run_files import save_json
from lit_fedad.experiment.run_folder import RunFolder
from lit_fedad.experiment.train import train
from lit_fedad.federation.processes import make_fabric
from lit_fedad.report.naming import METRIC_TITLES

pytestmark = pytest.mark.filterwarnings("ignore:.*RANDOM weights")


@pytest.fixture
def photos(tmp_path):
    """Four images of several sizes, kinds and folders, two of them with the same stem."""
    draw = np.random.default_rng(0)
    folder = tmp_path / "photos"
    for name, shape in {
        "a/one.png": (40, 60, 3),
        "a/one.jpg": (32, 32, 3),
        "b/one.png": (64, 48),
        "top.bmp": (33, 35, 3),
    }.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(draw.integers(0, 255, shape, dtype=np.uint8)).save(path)
    (folder / "notes.txt").write_text("not an image")
    return folder


def table(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_every_image_gets_a_score_a_decision_and_a_heatmap(tiny_run, photos, tmp_path):
    out = tmp_path / "out"
    rows = table(predict(str(tiny_run), str(photos), client=1, out=str(out)))
    assert [row["path"] for row in rows] == [
        str(photos / name) for name in ("a/one.jpg", "a/one.png", "b/one.png", "top.bmp")
    ]
    folder = RunFolder(tiny_run)
    rule = folder.calibration().rule(1, folder.alpha())
    for row in rows:
        assert float(row["threshold"]) == pytest.approx(rule.threshold, rel=1e-7)
        expected = float(rule.scores.p_values(torch.tensor([float(row["score"])])))
        assert float(row["p_value"]) == pytest.approx(expected, rel=1e-5)
        assert row["decision"] == ("anomalous" if float(row["score"]) > rule.threshold else "normal")
    heatmaps = [out / row["heatmap"] for row in rows]
    assert len(set(heatmaps)) == 4
    assert sorted(heatmaps) == sorted(out.rglob("*.png"))
    ((width, height),) = {Image.open(path).size for path in heatmaps}
    assert width == 32 < height  # the p-value stands below


def test_scores_are_those_of_the_run(tiny_run, tmp_path):
    """Predicting the test images gives the I-AUROC that the run reported for the client."""
    config = RunFolder(tiny_run).config()
    labels = {str(sample.path): sample.label for sample in build(config["data"]).test}
    reported = RunFolder(tiny_run).result()["last"]["i_auroc"]["per_client"]
    for client in (0, 1):
        rows = table(
            predict(str(tiny_run), config["data"]["root"], client=client, out=str(tmp_path / str(client)))
        )
        rows = [row for row in rows if row["path"] in labels]
        assert len(rows) == len(labels)
        found = roc_auc_score([labels[row["path"]] for row in rows], [float(row["score"]) for row in rows])
        assert found == pytest.approx(reported[str(client)], abs=1e-9)


def test_a_threshold_is_promised_where_there_are_images_enough(tiny_run, photos, tmp_path, capsys):
    calibration = RunFolder(tiny_run).calibration()
    sizes = RunFolder(tiny_run).result()["partition"]["sizes"]
    held = {client: sum(part.total for part in own.values()) for client, own in calibration.clients.items()}
    assert held == dict(enumerate(sizes))  # a model of sums: every training image calibrates
    for alpha, called in ((0.2, True), (0.001, False)):
        rows = table(predict(str(tiny_run), str(photos), out=str(tmp_path / str(alpha)), alpha=alpha))
        assert all((float(row["threshold"]) < np.inf) == called for row in rows)
        assert called or {row["decision"] for row in rows} == {"normal"}
    assert "too few to promise 0.001: that takes 999" in capsys.readouterr().out


def test_a_product_chooses_its_own_calibration(tiny_run, photos, tmp_path):
    calibration = RunFolder(tiny_run).calibration()
    product = next(iter(calibration.clients[0]))
    rows = table(predict(str(tiny_run), str(photos), out=str(tmp_path), alpha=0.2, product=product))
    expected = calibration.threshold(0, 0.2, product)
    assert [float(row["threshold"]) for row in rows] == pytest.approx([expected] * len(rows), rel=1e-7)
    for options, said in (
        ({"product": "moon"}, "product=moon: calibrated are"),
        ({"alpha": 1.5}, "alpha=1.5"),
        ({"alpha": "x"}, "alpha=x must be above 0"),
    ):
        with pytest.raises(UserError, match=said):
            predict(str(tiny_run), str(photos), out=str(tmp_path), **options)


@pytest.mark.parametrize(
    ("alike", "warned"), [(["screw", "screw", None, "nut"], False), (["screw", "screw", "screw", None], True)]
)
def test_images_that_look_like_another_product_are_warned_of(
    tiny_run, photos, tmp_path, monkeypatch, capsys, alike, warned
):
    """Told that they show the product, `predict` and `watch` compare them with its calibration images alone."""
    said = "images look like screw, not like"
    product = next(iter(RunFolder(tiny_run).calibration().clients[0]))
    monkeypatch.setattr(OpenedClient, "recognised", lambda opened, batch: (batch, alike))
    for told in (product, None):
        predict(str(tiny_run), str(photos), out=str(tmp_path / "scores"), product=told)
        assert (said in capsys.readouterr().err) == (warned and told is not None)
    watch(str(tiny_run), str(photos), out=str(tmp_path / "log"), product=product, once=True)
    assert (said in capsys.readouterr().err) == warned


def test_a_plain_trainer_predicts_the_same(tiny_run, photos, tmp_path):
    rows = table(predict(str(tiny_run), str(photos), client=0, out=str(tmp_path / "out")))
    config = RunFolder(tiny_run).config()
    model = build_model(config, RunFolder(tiny_run).result()["partition"]["products"])
    load_client(model, tiny_run, config, 0, make_fabric(accelerator="cpu"))
    samples = [Sample(photos / row["path"], "new") for row in rows]
    dataset = ImageDataset(samples, image_transform(config, model.task))
    module = FederatedDataModule(dataset, dataset, [range(len(samples))], eval_batch_size=3)
    predictions = plain_trainer().predict(model.client, module.test_dataloader())
    found = torch.cat([prediction.image_score for prediction in predictions])
    torch.testing.assert_close(found, torch.tensor([float(row["score"]) for row in rows]), rtol=1e-3, atol=0)
    assert predictions[0].anomaly_map.shape == (3, 32, 32)


@pytest.fixture
def roots(monkeypatch):
    """The folders that training data are read from."""
    asked = []
    read = textures.textures

    @functools.wraps(read)
    def record(root, **options):
        asked.append(str(root))
        return read(root, **options)

    monkeypatch.setattr(textures, "textures", record)
    return asked


def test_the_training_data_may_be_gone(photos, tmp_path):
    settings = ["method=federated_bank", "debug=seconds", "tracking=off", "cache.enabled=false"]
    data, run = tmp_path / "data", tmp_path / "run"
    train(compose([*settings, f"data.root={data}", f"out={run}"]), quiet=True)
    before = predict(str(run), str(photos), out=str(tmp_path / "before")).read_text()
    data.rename(tmp_path / "elsewhere")
    after = predict(str(run), str(photos), out=str(tmp_path / "after")).read_text()
    with pytest.raises(UserError, match=r"client=9"):
        predict(str(run), str(photos), client=9)
    assert after == before


def test_an_unreadable_image_costs_only_itself(tiny_run, photos, tmp_path, capsys):
    intact = table(predict(str(tiny_run), str(photos), out=str(tmp_path / "intact")))
    (photos / "a" / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\n and then nothing")
    capsys.readouterr()
    with pytest.raises(UserError, match=r"1 of 5 images could not be read; the others are scored"):
        predict(str(tiny_run), str(photos), out=str(tmp_path / "out"))
    rows = table(tmp_path / "out" / "scores.csv")
    lost = [row for row in rows if row["decision"] == "unreadable"]
    kept = [row for row in rows if row["decision"] != "unreadable"]
    assert [row["path"] for row in lost] == [str(photos / "a" / "broken.png")]
    assert lost[0]["score"] == lost[0]["heatmap"] == ""
    assert [row["path"] for row in kept] == [row["path"] for row in intact]
    before, after = ([float(row["score"]) for row in table] for table in (intact, kept))
    assert after == pytest.approx(before, rel=1e-5)
    left_out, lost = capsys.readouterr().err.splitlines()
    assert "skipped files that are no image (1, first" in left_out
    assert "broken.png" in lost


def test_long_names_cost_nothing_and_linked_folders_are_taken(tiny_run, photos, tmp_path):
    name = "m" * 240
    (photos / "top.bmp").rename(photos / f"{name}.bmp")
    shutil.copy(photos / "b" / "one.png", photos / f"{name}.png")
    (tmp_path / "elsewhere").mkdir()
    shutil.copy(photos / "a" / "one.jpg", tmp_path / "elsewhere" / "IM000001")
    (photos / "linked").symlink_to(tmp_path / "elsewhere")
    rows = table(predict(str(tiny_run), str(photos), out=str(tmp_path / "out")))
    assert len(rows) == 6
    by_path = {Path(row["path"]).relative_to(photos).as_posix(): row for row in rows}
    assert len({row["heatmap"] for row in rows}) == 6
    assert all((tmp_path / "out" / row["heatmap"]).is_file() for row in rows)
    scored = [float(by_path[path]["score"]) for path in ("a/one.jpg", "linked/IM000001")]
    assert scored[0] == pytest.approx(scored[1], rel=1e-5)


def test_a_file_without_suffix_does_not_take_the_heatmap_of_another(tiny_run, photos, tmp_path):
    for name in ("one.png", "one_png", "IM0001"):
        shutil.copy(photos / "b" / "one.png", photos / "a" / name)
    rows = table(predict(str(tiny_run), str(photos / "a"), out=str(tmp_path / "out")))
    names = [Path(row["heatmap"]).name for row in rows if Path(row["path"]).name != "one.jpg"]
    assert names[:2] == ["IM0001.png", "one_png.png"]
    assert len({*names}) == 3


def test_an_image_is_decoded_once_for_its_score_and_its_heatmap(tiny_run, photos, tmp_path, monkeypatch):
    decoded, whole = [], prediction.read_picture
    monkeypatch.setattr(
        prediction, "read_picture", lambda path, page: decoded.append(path) or whole(path, page)
    )
    monkeypatch.setattr(ImageTransform, "raw", None)
    rows = table(predict(str(tiny_run), str(photos), out=str(tmp_path / "out")))
    assert [str(path) for path in decoded] == [row["path"] for row in rows]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(errno.ENOSPC, "full")], ids=["stop", "full"])
def test_a_call_that_ends_early_tells_what_its_table_holds(
    copied_run, photos, tmp_path, monkeypatch, capsys, error
):
    out = tmp_path / "out"
    forge_config(copied_run, lambda config: config["evaluation"].update(batch_size=2))

    def draw(path, *args):
        if len(table(out / "scores.csv")) == 2:
            with (out / "scores.csv").open("a") as file:
                file.write("half of a row")
            raise error

    monkeypatch.setattr(prediction, "save_heatmap", draw)
    with pytest.raises((KeyboardInterrupt, UserError)):
        predict(str(copied_run), str(photos), out=str(out))
    assert len(table(out / "scores.csv")) == 2
    assert "scores.csv: holds 2 of 4 images" in " ".join(capsys.readouterr().err.split())


def test_a_folder_of_unreadable_images_is_told(tiny_run, tmp_path):
    (tmp_path / "bad.png").write_text("no")
    with pytest.raises(UserError, match=r"1 of 1 images could not be read$"):
        predict(str(tiny_run), str(tmp_path), out=str(tmp_path / "out"))


def test_by_default_the_largest_client_judges_into_the_runs_folder(tiny_run, photos, capsys):
    path = predict(str(tiny_run), str(photos / "top.bmp"))
    assert path == tiny_run / "predictions" / "scores.csv"
    largest = int(np.argmax(RunFolder(tiny_run).result()["partition"]["sizes"]))
    assert f"client {largest}: " in capsys.readouterr().out
    assert table(path)[0]["heatmap"] == "heatmaps/top_bmp.png"


def test_heatmaps_of_an_earlier_call_are_no_images(tiny_run, photos):
    first = predict(str(tiny_run), str(photos), out=str(photos / "judged")).read_text()
    assert predict(str(tiny_run), str(photos), out=str(photos / "judged")).read_text() == first


def test_the_colour_scale_hangs_on_the_threshold_alone(tiny_run, photos, tmp_path):
    """The same image looks the same whatever lies beside it."""
    predict(str(tiny_run), str(photos), out=str(tmp_path / "many"))
    predict(str(tiny_run), str(photos / "a" / "one.png"), out=str(tmp_path / "one"))
    many, one = (
        np.asarray(Image.open(tmp_path / name)).astype(int)
        for name in ("many/heatmaps/a/one_png.png", "one/heatmaps/one_png.png")
    )
    many, one = many[: one.shape[1]], one[: one.shape[1]]  # without the caption
    assert abs(many - one).max() <= 1  # the last bits of a convolution depend on the batch


def test_other_backbone_weights_are_refused(copied_run, photos, tmp_path):
    config = yaml.safe_load((copied_run / "config.yaml").read_text())
    config["backbone"]["seed"] = 1
    forge(copied_run, "config.yaml", yaml.safe_dump(config))
    message = r"differ from the run's \(random\); give backbone.weights=FILE"
    with pytest.raises(UserError, match=message):
        predict(str(copied_run), str(photos), out=str(tmp_path / "out"))
    with pytest.raises(UserError, match=message):
        evaluate(str(copied_run))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"client": 7}, "client=7: the run has clients 0, 1"),
        ({"client": -1}, "client=-1: the run has clients 0, 1"),
        ({"images": "nowhere"}, "images=nowhere: no such file or folder"),
        ({"overrides": {"task.grid": "8"}}, "'task.grid' cannot be given for a trained run"),
        ({"overrides": {"clint": "1"}}, "'clint' cannot be given for a trained run"),
        ({"overrides": {"backbone.weights": "gone.pth"}}, "gone.pth: no such file"),
    ],
)
def test_bad_input_is_one_line(tiny_run, photos, given, message):
    with refusal() as caught:
        predict(**{"run": str(tiny_run), "images": str(photos), **given})
    assert message in str(caught.value)


def test_a_folder_without_images_is_one_line(tiny_run, tmp_path):
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(UserError, match=r"no image there \(\.bmp"):
        predict(str(tiny_run), str(tmp_path))


def test_a_place_that_cannot_be_written_is_one_line(tiny_run, photos):
    with pytest.raises(UserError, match=r"notes\.txt: cannot be written"):
        predict(str(tiny_run), str(photos), out=str(photos / "notes.txt"))


def test_a_folder_that_another_command_writes_to_is_left_alone(tiny_run, photos, tmp_path):
    predict(str(tiny_run), str(photos), out=str(tmp_path / "out"))
    before = (tmp_path / "out" / "scores.csv").read_bytes()
    with locked(tmp_path / "out"), pytest.raises(UserError, match="another lit-fedad command is at work"):
        predict(str(tiny_run), str(photos / "top.bmp"), client=1, out=str(tmp_path / "out"))
    assert (tmp_path / "out" / "scores.csv").read_bytes() == before


@pytest.mark.parametrize(
    "command", [lambda run: predict(run, run), evaluate, lambda run: export(run, format=("pt2",))]
)
def test_an_incomplete_run_is_one_line(tiny_run, tmp_path, command):
    for name in ("config.yaml", "manifest.json"):
        shutil.copy(tiny_run / name, tmp_path)
    with pytest.raises(UserError, match="the run is not complete"):
        command(str(tmp_path))


def test_evaluation_equals_what_the_run_reported(tiny_run, capsys):
    evaluate(str(tiny_run))
    found = json.loads((tiny_run / "evaluation.json").read_text())
    reported = RunFolder(tiny_run).result()["last"]
    assert found == reported
    assert found["round"] == 2
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    shown = [row for row in rows if row and row[0] in ("I-AUROC", "P-AUROC", "PRO", "AUPR")]
    assert shown == [
        [title, *(f"{reported[name][key]:.3f}" for key in ("mean", "worst", "pooled", "product_mean"))]
        for name, title in METRIC_TITLES.items()
        if title in ("I-AUROC", "P-AUROC", "PRO", "AUPR")
    ]


def test_evaluation_finds_moved_data(tiny_run, tmp_path, roots):
    moved = shutil.copytree(tiny_run.parent / "data", tmp_path / "moved")
    evaluate(str(tiny_run), {"data.root": str(moved)})
    assert set(roots) == {str(moved)}
    assert json.loads((tiny_run / "evaluation.json").read_text()) == RunFolder(tiny_run).result()["last"]


def test_evaluation_refuses_other_training_images(copied_run):
    result = RunFolder(copied_run).result()
    result["partition"]["counts"][0][0] += 1
    save_json(copied_run, "result.json", result)
    with pytest.raises(UserError, match="not the images that the run was made with"):
        evaluate(str(copied_run))


def test_names_that_are_formulas_or_no_text_are_written_safely(tiny_run, tmp_path, monkeypatch, capsys):
    for name in ("=1+1.png", "@SUM(A1).png", "a\x1b[2J.png", os.fsdecode(b"b\xff.png")):
        Image.new("RGB", (40, 40)).save(tmp_path / name)
    (tmp_path / "\x1b[31mtext.png").write_text("no image")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="1 of 5 images could not be read"):
        predict(str(tiny_run), ".", out="out")
    with (tmp_path / "out/scores.csv").open(newline="", errors="surrogateescape") as file:
        rows = list(csv.DictReader(file))
    names, heatmaps = [row["path"] for row in rows], {row["heatmap"] for row in rows} - {""}
    assert len(heatmaps) == 4
    assert all(name.isprintable() and (tmp_path / "out" / name).is_file() for name in heatmaps)
    assert {"'=1+1.png", "'@SUM(A1).png", os.fsdecode(b"b\xff.png")} <= set(names)
    captured = capsys.readouterr()
    assert "\x1b" not in captured.out + captured.err
    assert r"\x1b[31mtext.png" in captured.err
