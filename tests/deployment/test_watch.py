"""A folder that grows is scored once an image, and what leaves it are counts."""

import csv
import json
import math
import os
import shutil

import numpy as np
import pytest
import torch
from helpers.refusals import refusal
from PIL import Image

from lit_fedad.contracts import Prediction
from lit_fedad.core.errors import UserError
from lit_fedad.deployment import live_detector
from lit_fedad.deployment import watch as module
from lit_fedad.deployment.export import export
from lit_fedad.deployment.live_detector import Scored
from lit_fedad.deployment.predict import predict
from lit_fedad.deployment.watch import watch
from lit_fedad.deployment.watch_log import COLUMNS, WatchLog, key_of
from lit_fedad.experiment.run_folder import RunFolder
from lit_fedad.metrics.drift import DriftTest
from lit_fedad.tracking.sender import Delivery

pytestmark = pytest.mark.filterwarnings("ignore:.*RANDOM weights")


@pytest.fixture
def camera(tiny_run, tmp_path):
    """Adds so many test images of the run to a folder, one second after the other."""
    sources = sorted((tiny_run.parent / "data").rglob("test/*/*.png"))
    folder = tmp_path / "camera"
    folder.mkdir()

    def shoot(images):
        taken = len(list(folder.iterdir()))
        for number in range(taken, taken + images):
            # Names that sort the other way round: the order is that of time.
            path = folder / f"{999 - number}.png"
            shutil.copyfile(sources[number % len(sources)], path)
            os.utime(path, (1_000_000 + number, 1_000_000 + number))
        return folder

    return shoot


@pytest.fixture
def exact(monkeypatch):
    """Scores that do not depend, in their last digits, on which images share a batch."""

    def brightness(self, images, rule, product=None):
        return [Scored(float(image), 0.5, "normal", None) for image in images]

    def read(paths, transform, display):
        return {path: np.asarray(Image.open(path)).mean() for path in paths}

    monkeypatch.setattr(module.OpenedClient, "scored", brightness)
    monkeypatch.setattr(module, "readable", read)


@pytest.fixture
def unpainted(monkeypatch):
    """Without the picture of drift, which takes longer than the scores."""
    monkeypatch.setattr(module, "find_spec", lambda name: None)


def look(run, images, out, **settings):
    return watch(str(run), str(images), client=1, once=True, out=str(out), **settings)


def table(out):
    with (out / "images.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_looking_twice_is_looking_once(exact, tiny_run, camera, tmp_path, capsys):
    settings = {"run_length": 4, "window": 5}
    look(tiny_run, camera(4), tmp_path / "twice", **settings)
    images = camera(5)
    twice = look(tiny_run, images, tmp_path / "twice", **settings)
    capsys.readouterr()
    once = look(tiny_run, images, tmp_path / "once", **settings)
    assert once == twice == json.loads((tmp_path / "once" / "summary.json").read_text())
    assert table(tmp_path / "once") == table(tmp_path / "twice")
    assert [row["path"] for row in table(tmp_path / "once")] == [f"{999 - n}.png" for n in range(9)]
    assert (tmp_path / "once" / "drift.png").is_file()
    alarms = [n for n, row in enumerate(table(tmp_path / "once"), 1) if row["alarm"] == "true"]
    assert once["alarms"] == alarms
    assert capsys.readouterr().err.count("the images drift from those of calibration") == len(alarms) > 0


@pytest.mark.usefixtures("unpainted")
def test_scores_and_decisions_are_those_of_predict(tiny_run, camera, tmp_path):
    images = camera(5)
    found = look(tiny_run, images, tmp_path / "out", alpha=0.3)
    scores = predict(str(tiny_run), str(images), client=1, out=str(tmp_path / "scores"), alpha=0.3)
    with scores.open(newline="") as file:
        expected = {row["path"].rpartition("/")[2]: row for row in csv.DictReader(file)}
    for row in table(tmp_path / "out"):
        same = expected[row["path"]]
        assert float(row["score"]) == pytest.approx(float(same["score"]), rel=1e-5)
        assert (row["decision"], row["threshold"]) == (same["decision"], same["threshold"])
    assert found["anomalous"] == sum(row["decision"] == "anomalous" for row in expected.values())


@pytest.mark.usefixtures("unpainted")
@pytest.mark.parametrize(("alpha", "said"), [(0.3, False), (0.0001, True)])
def test_a_rate_that_cannot_be_promised_is_said(tiny_run, camera, tmp_path, capsys, alpha, said):
    look(tiny_run, camera(1), tmp_path / "out", alpha=alpha)
    assert ("no image is called anomalous: " in capsys.readouterr().err) is said


@pytest.mark.usefixtures("unpainted")
def test_p_values_of_the_stream_are_those_of_the_test_of_drift(tiny_run, camera, tmp_path):
    found = look(tiny_run, camera(6), tmp_path / "out", window=4)
    calibration = RunFolder(tiny_run).calibration().rule(1, 0.5).scores
    test = DriftTest(calibration, seed=RunFolder(tiny_run).config()["seed"])
    steps = test.add([float(row["score"]) for row in table(tmp_path / "out")])
    p_values = [float(row["stream_p_value"]) for row in table(tmp_path / "out")]
    assert p_values == pytest.approx([step.p_value for step in steps], rel=1e-5)
    assert found["log10_martingale"] == pytest.approx(steps[-1].log_martingale)
    assert sum(found["p_values"]) == 6
    assert sum(found["scores"]["seen"]) == 4
    assert sum(found["scores"]["expected"]) == calibration.total


@pytest.mark.slow
def test_only_new_and_changed_files_are_scored(tiny_run, camera, tmp_path):
    images, out = camera(2), tmp_path / "camera" / "out"  # its picture of drift is none of the images
    (images / "half.png").write_bytes(b"half")
    os.utime(images / "half.png", (999_999, 999_999))
    found = look(tiny_run, images, out)
    assert (found["images"], found["unreadable"]) == (2, 1)
    assert table(out)[0]["decision"] == "unreadable"
    assert look(tiny_run, images, out) == found
    shutil.copyfile(images / "999.png", images / "half.png")
    found = look(tiny_run, images, out)
    assert (found["images"], found["unreadable"]) == (3, 1)
    assert float(table(out)[-1]["score"]) == pytest.approx(float(table(out)[1]["score"]), rel=1e-5)


def test_a_file_is_known_by_its_place_in_the_folder(tmp_path):
    (tmp_path / "line 2").mkdir()
    image = tmp_path / "line 2" / "1.png"
    image.touch()
    assert [key_of(image, root)[0] for root in (tmp_path, image)] == ["line 2/1.png", "1.png"]


@pytest.mark.usefixtures("unpainted")
def test_what_a_killed_call_left_half_written_is_written_anew(exact, tiny_run, camera, tmp_path):
    whole = look(tiny_run, camera(3), tmp_path / "out")
    path = tmp_path / "out" / "images.csv"
    content = path.read_bytes()
    path.write_bytes(content[: content.rstrip().rfind(b"\n") + 9])
    assert look(tiny_run, camera(0), tmp_path / "out") == whole
    assert path.read_bytes() == content


@pytest.mark.parametrize("left", [b"", b"path,byt"])
def test_a_call_that_was_killed_as_it_began_the_table_leaves_one_to_begin_anew(tmp_path, left):
    log = WatchLog.open(tmp_path, {})
    log.images.write_bytes(left)
    assert log.rows() == []
    log.append([dict.fromkeys(COLUMNS, "")])
    assert len(log.rows()) == 1


def test_a_file_of_somebody_else_is_not_emptied(tmp_path):
    log = WatchLog.open(tmp_path, {})
    log.images.write_bytes(b"notes without an end of line")
    with refusal(rf"^{log.images}: not the table of a watch"):
        log.rows()
    assert log.images.read_bytes() == b"notes without an end of line"


@pytest.mark.usefixtures("unpainted")
def test_the_folder_is_looked_at_until_the_user_ends_it(tiny_run, camera, tmp_path, monkeypatch):
    waited = []

    def sleep(seconds):
        waited.append(seconds)
        if len(waited) == 3:
            raise KeyboardInterrupt
        camera(2)

    monkeypatch.setattr(module.time, "sleep", sleep)
    with pytest.raises(KeyboardInterrupt):
        watch(str(tiny_run), str(camera(0)), interval=7, out=str(tmp_path / "out"))
    assert waited == [7, 7, 7]
    assert len(table(tmp_path / "out")) == 4


@pytest.mark.usefixtures("exact", "unpainted")
def test_images_are_searched_for_only_after_a_change(tiny_run, camera, tmp_path, monkeypatch):
    search, searched = module.listed, []
    changes = [lambda: None, lambda: os.utime(camera(0) / "999.png", (2, 2)), lambda: None]

    def listed(root):
        searched.append(len(changes))
        return search(root)

    def sleep(seconds):
        if not changes:
            raise KeyboardInterrupt
        changes.pop(0)()

    monkeypatch.setattr(module, "listed", listed)
    monkeypatch.setattr(module.time, "sleep", sleep)
    with pytest.raises(KeyboardInterrupt):
        watch(str(tiny_run), str(camera(2)), interval=1, out=str(tmp_path / "out"))
    assert searched == [3, 1]
    assert [row["path"] for row in table(tmp_path / "out")] == ["999.png", "998.png", "999.png"]


@pytest.mark.usefixtures("unpainted")
@pytest.mark.slow
def test_mlflow_gets_counts_of_ten_new_images_and_nothing_of_one(copied_run, camera, tmp_path, monkeypatch):
    sent = []

    def amend(*given):
        sent.append(given)
        return Delivery(None, 0, None)

    monkeypatch.setattr(module, "amend", amend)
    # A copy: beside another test that is at work in the run's folder, nothing is sent yet.
    run, out = copied_run, tmp_path / "out"
    look(run, camera(9), out)
    assert sent == []
    look(run, camera(2), out)
    look(run, camera(9), out)
    ((folder, metrics, step, files, place),) = sent
    assert (folder, step, files, place) == (run, 11, [out / "summary.json"], "watch/client_1")
    assert set(metrics) == {
        f"watch/client_1/{name}"
        for name in ("images", "unreadable", "anomalous", "alarms", "log10_martingale", "statistic",
                     "ks", "ks_p_value", "psi", "psi_limit")
    }  # fmt: skip
    content = (out / "summary.json").read_text()
    for row in table(out):
        assert row["path"] not in content
        assert row["score"][:6] not in content


@pytest.mark.usefixtures("unpainted")
@pytest.mark.slow
def test_bad_input_is_one_line(tiny_run, camera, tmp_path):
    images, out = camera(2), tmp_path / "out"
    look(tiny_run, images, out)
    own = RunFolder(tiny_run).calibration().rule(1, "auto").alpha
    for settings, message in (
        ({"run_length": 5}, r"holds a watch with run_length=10000, not run_length=5; give another"),
        (
            {"alpha": 0.5},
            rf"holds a watch with alpha={own}, not alpha=0.5",
        ),
        ({"product": "grass"}, r"holds a watch with product=None, not product=grass"),
        ({"product": "gras"}, r"product=gras: calibrated are"),
        ({"run_length": 0}, r"watch.run_length=0 must be at least 1"),
        ({"interval": 0}, r"watch.interval=0 must be above 0"),
    ):
        with refusal(message):
            look(tiny_run, images, out, **settings)
    with pytest.raises(UserError, match="no such file or folder"):
        look(tiny_run, tmp_path / "nowhere", tmp_path / "other")
    assert not (tmp_path / "other").exists()
    shutil.copytree(images, tmp_path / "second")
    with pytest.raises(
        UserError, match=r"holds a watch with images=\S+camera, not images=\S+second; give another"
    ):
        look(tiny_run, tmp_path / "second", out)
    held = (out / "watch.json").read_text()
    (out / "watch.json").write_text(json.dumps({**json.loads(held), "calibration": {}}))
    with pytest.raises(
        UserError, match="watch by the calibration scores of another version of the detector; give"
    ):
        look(tiny_run, images, out)
    (out / "watch.json").write_text(held)
    (out / "images.csv").write_text("path,score\na.png,1\n")
    with pytest.raises(UserError, match=r"images.csv: not the table of a watch; remove it"):
        look(tiny_run, images, out)
    (out / "watch.json").write_text("[]")
    with pytest.raises(UserError, match=r"watch.json: cannot be read"):
        look(tiny_run, images, out)


@pytest.mark.usefixtures("unpainted")
def test_a_score_that_is_no_number_is_a_high_one(tiny_run, camera, tmp_path, monkeypatch):
    """It is called anomalous, as by `predict`, and the watch goes on."""

    def predict_batch(client, batch, fabric):
        scores = torch.zeros(len(batch["image"]))
        scores[1] = math.nan
        return Prediction(scores)

    monkeypatch.setattr(live_detector, "predict_batch", predict_batch)
    images, out = camera(3), tmp_path / "out"
    found = look(tiny_run, images, out, alpha=0.3)
    assert (found["images"], found["anomalous"]) == (3, 1)
    assert [row["decision"] for row in table(out)] == ["normal", "anomalous", "normal"]
    assert table(out)[1]["score"] == "nan"
    assert look(tiny_run, images, out, alpha=0.3) == found


@pytest.mark.parametrize(
    ("command", "name"), [(predict, "predictions"), (watch, "watch"), (export, "export")]
)
def test_a_run_that_cannot_be_written_to_asks_for_another_folder(copied_run, camera, command, name):
    shutil.rmtree(copied_run / name, ignore_errors=True)  # of other tests
    (copied_run / name).write_text("")  # no folder: nobody can write below it, root included
    with pytest.raises(UserError, match=r"cannot be written \(.*\); give out=DIR"):
        command(str(copied_run), images=str(camera(1)), client=1)
