"""Figures of tables: quantities over the rounds, and pictures side by side."""

import math

import numpy as np
import pytest
from helpers.refusals import refusal
from PIL import Image

from lit_fedad.report.run_figures import sheet
from lit_fedad.report.table_figures import rounds_figure, rounds_frame, sheets_figure
from lit_fedad.report.tables import Outcome, Row, Table


def table(figure, quantities):
    rows = [Row("with", ["method=a"]), Row("without", ["method=b"])]
    return Table(
        "t", "s", ["accuracy"], "r", {"Path": "path"}, [], rows, figure=figure, quantities=quantities
    )


def result(first, last):
    """Accuracy after rounds 0 and 2, a discrepancy of rounds 1 and 2 that round 1 does not have, losses."""
    return {
        "metrics": {"0": {"accuracy": first}, "2": {"accuracy": last}},
        "exchanges": [0, 1, 2],
        "scalars": [{}, {"knowledge_mmd": math.nan}, {"knowledge_mmd": 0.25}],
        "client_losses": [{}, {"0": 2.0, "1": 3.0}, {"1": 1.5}],
    }


OUTCOMES = [
    Outcome("with", "Path", 0, "a", result(0.5, 0.75)),
    Outcome("with", "Path", 1, "b", result(0.5, 1.0)),
    Outcome("without", "Path", 0, "c", cause="no images"),
]


def test_metrics_are_of_evaluations_and_scalars_of_rounds():
    frame = rounds_frame(table("rounds", ["accuracy", "knowledge_mmd"]), OUTCOMES)
    listed = frame[["seed", "quantity", "round", "value"]].to_numpy().tolist()
    assert listed == [
        [0, "accuracy", 0, 0.5],
        [0, "accuracy", 2, 0.75],
        [0, "knowledge_mmd", 2, 0.25],
        [1, "accuracy", 0, 0.5],
        [1, "accuracy", 2, 1.0],
        [1, "knowledge_mmd", 2, 0.25],
    ]
    assert set(frame["row"]) == {"with"}


def test_losses_are_by_client():
    frame = rounds_frame(table("clients", ["loss"]), OUTCOMES[:1])
    assert frame[["client", "round", "value"]].to_numpy().tolist() == [
        ["0", 1, 2.0],
        ["1", 1, 3.0],
        ["1", 2, 1.5],
    ]


def test_a_panel_has_the_mean_over_seeds():
    shown = table("rounds", ["accuracy", "knowledge_mmd"])
    accuracy, discrepancy = rounds_figure(shown, ["Path"], rounds_frame(shown, OUTCOMES)).axes
    (line,) = accuracy.lines
    assert (list(line.get_xdata()), list(line.get_ydata())) == ([0, 2], [50.0, 87.5])
    assert accuracy.get_ylabel() == "accuracy (%)"
    assert list(discrepancy.lines[0].get_ydata()) == [0.25]


def test_each_client_has_a_panel():
    shown = table("clients", ["loss"])
    axes = rounds_figure(shown, ["Path"], rounds_frame(shown, OUTCOMES)).axes
    assert [one.get_title() for one in axes] == ["Path, client 0", "Path, client 1"]
    assert list(axes[1].lines[0].get_ydata()) == [3.0, 1.5]


@pytest.mark.parametrize("figure", ["rounds", "clients"])
def test_without_a_run_there_are_empty_panels(figure):
    shown = table(figure, ["loss"])
    frame = rounds_frame(shown, OUTCOMES[2:])
    assert frame.empty
    assert [one.lines[:] for one in rounds_figure(shown, ["Path"], frame).axes] == [[]]


def test_each_picture_stands_in_its_place(tmp_path):
    file = tmp_path / "a.png"
    Image.fromarray(np.full((4, 8, 3), 7, np.uint8)).save(file)
    axes = sheets_figure(["one", "two"], ["Path"], {("two", "Path"): file}).axes
    assert [one.get_title() for one in axes] == ["one, Path", "two, Path"]
    assert [text.get_text() for text in axes[0].texts] == ["no run with pictures"]
    assert np.array_equal(axes[1].images[0].get_array(), np.full((4, 8, 3), 7))


@pytest.mark.parametrize("damage", ["emptied", "cut", "written over", "a link"])
@pytest.mark.parametrize(
    "read", [sheet, lambda file: sheets_figure(["one"], ["Path"], {("one", "Path"): file})]
)
def test_a_picture_that_is_none_any_more_is_one_line(tmp_path, damage, read):
    file = tmp_path / "a.png"
    Image.effect_noise((64, 64), 9).save(file)
    if damage == "a link":
        file.rename(tmp_path / "b.png")
        file.symlink_to(tmp_path / "b.png")
    else:
        content = {"emptied": b"", "cut": file.read_bytes()[:500], "written over": b"hello"}
        file.write_bytes(content[damage])
    with refusal() as error:
        read(file)
    assert str(error.value).startswith(f"{file}: ")
