"""What the operator's page reads of a run."""

from __future__ import annotations

import json

import pytest
import torch
from helpers.refusals import refusal

from lit_fedad.core.errors import UserError
from lit_fedad.deployment.ui.reading import (
    RunView,
    drift,
    false_alarm_rate,
    histogram,
    histogram_svg,
    read_scored,
)
from lit_fedad.experiment.run_folder import RunFolder
from lit_fedad.metrics.conformal import Calibration, ScoreCounts

SCORES = torch.arange(1.0, 101)
RESULT = {
    "method": "feddymem",
    "data": "nuts",
    "rounds": 2,
    "partition": {"sizes": [60, 40]},
    "exchanges": [0, 1, 2],
    "exchange_names": ["memory", "train", "train"],
    "bytes_up": [1000, 2000, 3000],
    "bytes_down": [0, 10, 20],
    "seconds_per_round": [0.5, 1.25, 2.0],
    "metrics": {"1": {"i_auroc": 0.5}, "2": {"i_auroc": 0.75, "pro": None}},
    "last": {"i_auroc": {"per_client": {"0": 0.7, "1": 0.8}}},
    "failures": {"1": {"1": "gone"}},
    "refused": {"2": {"0": "NaN"}},
    "unscored": {},
}
STATUS_OF_A_SITE = {
    **dict.fromkeys(("rounds", "last_round", "bytes_up", "bytes_down"), 1),
    "false_alarm_rate": 0.5,
}


@pytest.fixture
def view(tmp_path, monkeypatch):
    monkeypatch.setattr(RunView, "alpha", 0.05)
    calibration = Calibration({0: {"nut": ScoreCounts.of(SCORES)}, 1: {}}, shared=True)
    return RunView(tmp_path, RESULT, {}, calibration)


def table(folder, rows, head="path,score,p_value,threshold,decision,heatmap"):
    path = folder / "predictions/scores.csv"
    (path.parent / "heatmaps").mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join([head, *rows]) + "\n")
    return path


def test_a_complete_run_is_listed_by_round_site_and_trouble(view):
    assert view.title == "feddymem on nuts, 2 rounds"
    assert [(row["round"], row["value"]) for row in view.curves()] == [(1, 0.5), (2, 0.75)]
    assert [row["sites lost"] for row in view.rounds()] == [0, 1, 1]
    assert [row["round"] for row in view.rounds()] == ["set-up memory", "1", "2"]
    assert [(row["site"], row["images"], row["I-AUROC"]) for row in view.sites()] == [
        ("client 0", 60, "0.700"),
        ("client 1", 40, "0.800"),
    ]
    assert view.troubles() == [
        {"round": "1", "site": "client 1", "cause": "gone"},
        {"round": "2", "site": "client 0", "cause": "NaN"},
    ]


def test_a_site_that_fails_and_is_not_scored_is_lost_once(view):
    lost = RunView(view.path, {**RESULT, "unscored": {"1": {"1": "gone"}}}, {}, None)
    assert [row["sites lost"] for row in lost.rounds()] == [0, 1, 1]


def test_a_federation_of_sites_is_listed_by_name(tmp_path):
    site = {"rounds": 3, "last_round": 3, "bytes_up": 5, "bytes_down": 6, "false_alarm_rate": None}
    sites = {"north": {**site, "troubles": ["round 2: deadline: 60 s"]}, "south": {**site, "troubles": []}}
    view = RunView(tmp_path, {}, {"round": 3, "rounds": 9, "sites": sites}, None)
    assert view.title.endswith("round 3 of 9")
    assert [row["site"] for row in view.sites()] == ["north", "south"]
    assert view.troubles() == [{"round": "2", "site": "north", "cause": "deadline: 60 s"}]
    assert (view.curves(), view.rounds(), view.clients()) == ([], [], [])


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("result.json", {**RESULT, "exchanges": ["x", 1, 2]}),
        ("result.json", {**RESULT, "metrics": 3}),
        ("result.json", {name: value for name, value in RESULT.items() if name != "rounds"}),
        ("status.json", {"round": 1, "rounds": 2, "sites": {"north": {**STATUS_OF_A_SITE, "troubles": [3]}}}),
    ],
)
def test_what_no_run_writes_is_one_line(tmp_path, monkeypatch, name, content):
    monkeypatch.setattr(RunFolder, "find", lambda run: RunFolder(tmp_path))
    monkeypatch.setattr(RunFolder, "config", lambda folder: {"image": {}})
    (tmp_path / "result.json").write_text(json.dumps(RESULT))
    (tmp_path / name).write_text(json.dumps(content))
    with refusal(name) as caught:
        RunView.open(str(tmp_path))
    assert str(tmp_path) in str(caught.value)


def test_at_the_shipped_threshold_alpha_is_expected(view):
    rule = view.shipped(0, None)
    counts = rule.scores
    rate = false_alarm_rate(counts, rule.threshold)
    assert rate <= rule.alpha < rate + 1 / (counts.total + 1)
    assert false_alarm_rate(counts, 0.0) == 1
    assert false_alarm_rate(counts, 1e9) == pytest.approx(1 / 101)


def test_no_bar_of_the_histogram_lies_on_both_sides_of_the_threshold():
    rows = histogram(ScoreCounts.of(SCORES), [50.0, 200.0, float("nan")], 60.3)
    by = {name: [row for row in rows if row["images"] == name] for name in ("calibration", "new images")}
    assert [sum(row["share"] for row in part) for part in by.values()] == pytest.approx([1, 1])
    assert sum(row["share"] for row in by["calibration"] if row["score"] > 60.3) == pytest.approx(0.4)
    drawn = histogram_svg(rows, 60.3)
    assert drawn.count("<rect") == len(rows) + 2  # and two of the legend
    assert "threshold 60.3" in drawn
    assert "threshold" not in histogram_svg(rows, float("inf"))
    assert histogram(ScoreCounts.of(SCORES[:0]), [], 1.0) == []


def test_scores_that_no_detector_has_are_in_no_bar():
    counts = ScoreCounts.of(SCORES)
    strange = [1e308, -1e308, float("nan"), float("inf"), 50.0]
    assert histogram(counts, strange, 60.0) == histogram(counts, [50.0], 60.0)


def test_scored_images_come_most_anomalous_first_with_their_own_heatmaps(tmp_path):
    rows = [
        "a.png,1.5,0.5,3,normal,heatmaps/a.png",
        "b.png,9,0.01,3,anomalous,heatmaps/b.png",
        "c.png,,,,unreadable,",
        "d.png,8,0.01,3,anomalous,../../secret.png",
    ]
    path = table(tmp_path, rows)
    for name in ("predictions/heatmaps/b.png", "secret.png"):
        (tmp_path / name).write_bytes(b"")
    found = read_scored(path)
    assert [image.path for image in found] == ["b.png", "d.png", "a.png"]
    # Neither one that is missing nor one from elsewhere is shown.
    assert [image.heatmap for image in found] == [tmp_path / "predictions/heatmaps/b.png", None, None]
    with pytest.raises(UserError, match=r"scores\.csv: is no table of scores"):
        read_scored(table(tmp_path, ["a.png,high,0.5,3,normal,"]))
    with pytest.raises(UserError, match=r"scores\.csv: is no table of scores"):
        read_scored(table(tmp_path, ["1"], head="other"))


def test_no_heatmap_is_looked_for_before_it_is_asked_for(tmp_path, monkeypatch):
    path = table(tmp_path, ["a.png,1.5,0.5,3,normal,heatmaps/a.png"] * 100)
    looked = []
    monkeypatch.setattr(type(path), "resolve", lambda self: looked.append(self) or self.absolute())
    monkeypatch.setattr(type(path), "is_file", lambda self: True)
    found = read_scored(path)
    before = len(looked)
    assert before < 10
    assert found[0].heatmap == tmp_path / "predictions/heatmaps/a.png"
    assert len(looked) > before


def test_drift_is_what_the_watch_says(tmp_path):
    path = table(tmp_path, [])
    assert drift(path) is None
    summary = path.with_name("summary.json")
    summary.write_text(json.dumps({"alarms": [7], "images": 9, "psi": 1, "psi_limit": 2, "ks_p_value": 0.1}))
    assert drift(path)["alarms"] == [7]
    nothing = {"alarms": [], "images": 0, "psi": 0.1, "psi_limit": None, "ks_p_value": None}
    summary.write_text(json.dumps(nothing))
    assert drift(path)["images"] == 0
    summary.write_text("{}")
    with pytest.raises(UserError, match=r"summary\.json: cannot be read"):
        drift(path)
