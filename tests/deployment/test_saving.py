"""Thresholds that the operator's page saves as versions of a detector."""

import csv
import errno
import json
import os
import shutil
from pathlib import Path

import pytest
from helpers.damage import forge

from lit_fedad.core.errors import UserError
from lit_fedad.data.additions import Addition
from lit_fedad.data.sample import Sample
from lit_fedad.deployment.new_rate import choose_version, save_threshold
from lit_fedad.deployment.predict import predict
from lit_fedad.deployment.ui.command import trial
from lit_fedad.deployment.ui.reading import RunView
from lit_fedad.deployment.update import UpdateOptions, update
from lit_fedad.deployment.watch import watch
from lit_fedad.evaluation.decisions import RATES
from lit_fedad.experiment.run_folder import RunFolder


@pytest.fixture
def run(tiny_run, tmp_path):
    return Path(shutil.copytree(tiny_run, tmp_path / "run"))


@pytest.fixture
def built(run, tmp_path):
    """Builds the operator's page of the run, whose reviews are ``reviews.csv``."""
    pytest.importorskip("gradio")
    from lit_fedad.deployment.ui.page import OperatorPage

    return lambda: OperatorPage(RunView.open(str(run)), tmp_path / "reviews.csv", trial(run)).build()


def buttons(page):
    """What a page does at a click or a visit, by the name of its function."""
    return {function.name: function.fn for function in page.fns.values()}


def above(counts, threshold):
    return int(counts.counts[counts.edges > threshold].sum())


def test_a_saved_threshold_is_a_version_that_can_be_taken_back(run):
    view = RunView.open(str(run))
    counts, trained_limit = view.shipped(0, None).scores, view.shipped(0, None).threshold
    middle = len(counts.edges) // 2
    at = float(counts.edges[middle - 1 : middle + 1].mean())  # between two calibration scores
    trained = {path.name: path.read_bytes() for path in run.iterdir() if path.is_file()}
    said, before, saved = save_threshold(view, 0, None, at)
    version = RunFolder(run).version(None)
    assert (before, version.path.name, said.startswith("Version 1 is the default")) == (0, "1", True)
    limit = version.calibration().rule(0, version.alpha()).threshold
    deciding = version.calibration().rule(0, version.alpha()).scores
    assert version.alpha() == (1 + above(deciding, at)) / (deciding.total + 1)
    assert above(deciding, limit) == above(deciding, at)
    assert not set(version.result()["last"]) & set(RATES), "decisions by the new rate were not judged yet"
    assert {path.name: path.read_bytes() for path in run.iterdir() if path.is_file()} == trained
    assert RunView.open(str(run)).shipped(0, None).threshold == limit
    assert view.shipped(0, None).threshold == limit != trained_limit, "a page that is open shows it too"
    assert view.rules()[0].threshold == limit
    choose_version(view, before, saved)
    assert view.shipped(0, None).threshold == trained_limit
    assert RunFolder(run).version(None).path == run
    assert "no rate is lower" not in said
    assert "no rate is lower" in save_threshold(view, 0, None, float(counts.edges[-1]) + 1)[0]
    with pytest.raises(UserError, match="alpha=1 must be above 0 and below 1"):
        save_threshold(view, 0, None, float(counts.edges[0]) - 1)
    with pytest.raises(UserError, match=r"alpha=0\.001: no client has calibration images enough"):
        update(UpdateOptions(str(run), alpha=0.001))
    assert RunFolder(run).versions() == [0, 1, 2]


def test_what_another_saved_meanwhile_is_not_undone(run):
    """Two browsers show one run: each takes back its own threshold alone."""
    view = RunView.open(str(run))
    edges = view.shipped(0, None).scores.edges
    mine, others = (save_threshold(view, 0, None, float(edges[-k - 1 : 1 - k].mean()))[1:] for k in (2, 3))
    with pytest.raises(UserError, match=r"version 2 is the default by now, which was not saved here"):
        choose_version(view, *mine)
    assert RunFolder(run).default_version() == 2
    choose_version(view, *others)
    choose_version(view, *mine)
    assert RunFolder(run).default_version() == 0


def test_a_version_without_its_result_keeps_its_number(run):
    first = update(UpdateOptions(str(run), alpha=0.5))
    (first / "result.json").unlink()
    assert update(UpdateOptions(str(run), alpha=0.5)).name == "2"
    assert RunFolder(run).versions() == [0, 2]
    assert (first / "calibration.json").exists()


def test_a_version_of_another_rate_keeps_the_images_that_were_added(run):
    added = [Addition({0: (Sample(Path("new.png"), "weave"),)})]
    RunFolder(run).save_additions(added)
    assert RunFolder(update(UpdateOptions(str(run), alpha=0.5))).additions() == added


def test_a_version_that_cannot_be_written_is_said_with_its_cause(run, monkeypatch):
    def full(source, target):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(shutil, "copyfile", full)
    with pytest.raises(UserError, match=r"run: cannot be written \(No space left on device\)$"):
        update(UpdateOptions(str(run), alpha=0.5))
    assert RunFolder(run).versions() == [0]


def test_the_page_s_buttons_save_and_undo(run, built):
    press = buttons(built())
    at = float(RunView.open(str(run)).shipped(0, None).scores.edges[-3:-1].mean())
    said, versions, _ = press["keep"](0, "any", at, [])
    assert (said.split(":")[0], versions) == ("Version 1 is the default", [[0, 1]])
    assert press["undo"](versions)[:2] == ("Version 0 is the default again.", [])
    assert press["undo"]([])[:2] == ("Nothing is left to undo.", [])
    assert RunFolder(run).default_version() == 0


def other_scores(run, number):
    """Gives a version other calibration scores, as an update does."""
    counts = {"bins": [1, 2, 3], "counts": [1, 1, 1]}
    stored = json.loads((run / "versions" / str(number) / "calibration.json").read_text())
    stored["clients"] = {client: dict.fromkeys(own, counts) for client, own in stored["clients"].items()}
    forge(run / "versions" / str(number), "calibration.json", json.dumps(stored))


def test_a_threshold_of_scores_that_are_the_default_version_s_no_more_is_not_saved(run):
    view = RunView.open(str(run))
    at = float(view.shipped(0, None).scores.edges[-3:-1].mean())
    update(UpdateOptions(str(run), alpha=0.5))
    other_scores(run, 1)
    update(UpdateOptions(str(run), default=1))
    with pytest.raises(UserError, match="is the default version now, of other calibration scores"):
        save_threshold(view, 0, None, at)
    assert RunFolder(run).versions() == [0, 1]


def damaged_reviews(run, reviews):
    reviews.write_text("path,review\na.png,False Alarm\n")


def removed(run, reviews):
    shutil.rmtree(run)


def updated(run, reviews):
    update(UpdateOptions(str(run), alpha=0.5))
    other_scores(run, 1)
    update(UpdateOptions(str(run), default=1))


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        (damaged_reviews, "review 'False Alarm' is none of correct"),
        (removed, "calibration.json: cannot be read"),
        (updated, "is the default version now"),
    ],
)
def test_the_page_tells_what_its_user_can_mend(run, built, tmp_path, change, cause):
    gradio = pytest.importorskip("gradio")
    health = buttons(built())["_health"]
    health()
    change(run, tmp_path / "reviews.csv")
    with pytest.raises(gradio.Error, match=cause):
        health()


def test_a_watch_that_has_seen_no_image_yet_is_told(run, built, tmp_path):
    (tmp_path / "empty").mkdir()
    watch(str(run), str(tmp_path / "empty"), client=0, once=True)
    assert "No image watched yet" in buttons(built())["_health"]()


@pytest.mark.slow
def test_a_version_of_another_rate_decides_as_that_rate_does(run, tiny_run, tmp_path):
    images = next((tiny_run.parent / "data").rglob("test"))

    def decisions(name, **options):
        with predict(str(run), str(images), client=0, out=str(tmp_path / name), **options).open() as file:
            return [(row["score"], row["threshold"], row["decision"]) for row in csv.DictReader(file)]

    asked = decisions("a", alpha=0.5)
    assert update(UpdateOptions(str(run), alpha=0.5)) == run / "versions" / "1"
    assert decisions("b", version=1) == asked != decisions("c")
    # A version of the version has its rate, and the default stays the default.
    assert RunFolder(run).default_version() == 0


def test_the_page_of_a_stranger_s_run_loads_nothing_from_elsewhere(run, built):
    """Markdown loads the pictures that it names."""
    gradio = pytest.importorskip("gradio")
    named = "![x](http://127.0.0.1:9/x.png)"
    forge(run, "result.json", json.dumps({**RunFolder(run).result(), "method": named}))
    texts = [
        part.value for part in built().blocks.values() if isinstance(part, gradio.Markdown) and part.value
    ]
    assert any(r"# !\[x\](http://" in text for text in texts)
    assert not any(named in text for text in texts)
