"""Names of products, files and runs stand in figures as they are, dollar signs too."""

import io

import numpy as np
import pandas as pd
import pytest
from matplotlib.text import Text

from lit_fedad.experiment.figures.condensed import knowledge_sheet
from lit_fedad.report.figures import partition_figure, save_figure, stages_figure
from lit_fedad.report.heatmaps import Case, heatmap_sheet
from lit_fedad.report.run_figures import lines_figure, svg
from lit_fedad.report.style import blank_figure, labelled_axes
from lit_fedad.report.table_figures import rounds_figure, rows_figure, sheets_figure, tasks_figure
from lit_fedad.report.tables import Row, Table

NAME = r"$5_$6"  # what stands between the two signs is no formula
PIXELS = np.zeros((8, 8, 3), np.uint8)
IMAGES = np.zeros((1, 3, 8, 8), np.uint8), np.zeros(1, int)
RUNS = pd.DataFrame([{"row": NAME, "column": NAME, "pro_last": 0.5, "pro_task_1": 0.5}])
ROUNDS = pd.DataFrame(
    [{"row": NAME, "column": NAME, "seed": 0, "quantity": "pro", "client": "", "round": 1, "value": 0.5}]
)


def table(figure):
    return Table("", "", ["pro"], NAME, {NAME: NAME}, (), [Row(NAME, ())], figure=figure, quantities=["pro"])


FIGURES = {
    "partition": lambda: partition_figure(np.ones((1, 1), int), [NAME]),
    "heatmaps": lambda: heatmap_sheet([Case(PIXELS, None, np.zeros((8, 8)), NAME)], NAME),
    "knowledge sheet": lambda: knowledge_sheet({1: IMAGES}, [NAME]),
    "lines": lambda: lines_figure({NAME: [[(1, 0.5)]]}, NAME, NAME, whole=True),
    "rows": lambda: rows_figure(table("rows"), [NAME], RUNS),
    "tasks": lambda: tasks_figure(table("tasks"), [NAME], RUNS),
    "rounds": lambda: rounds_figure(table("rounds"), [NAME], ROUNDS),
    "sheets": lambda: sheets_figure([NAME], [NAME], {}),
}


@pytest.mark.parametrize("name", FIGURES)
def test_a_name_with_dollar_signs_is_drawn_as_it_is(name):
    figure = FIGURES[name]()
    figure.savefig(io.BytesIO(), format="png", dpi=20)
    texts = [text.get_text() for text in figure.findobj(Text)]
    assert any(r"\$5_\$6" in text for text in texts)
    assert not any(NAME in text for text in texts)


@pytest.mark.parametrize("name", ["a\x1b[2J", "a\u202eb", "a\udcff"], ids=["escape", "turned", "no UTF-8"])
def test_what_no_terminal_is_given_is_escaped(name):
    figure = partition_figure(np.ones((1, 1), int), [name])
    figure.savefig(io.BytesIO(), format="png", dpi=20)
    (text,) = figure.legends[0].get_texts()
    assert text.get_text() == name.encode("unicode_escape").decode()


def test_one_long_name_makes_no_room_for_many():
    figures = [partition_figure(np.ones((1, 9), int), [*"abcdefgh", name]) for name in ("x" * 50, "x" * 150)]
    heights = [figure.get_figheight() for figure in figures]
    assert heights[1] - heights[0] == pytest.approx(2 * 0.15)


@pytest.mark.parametrize(
    "names",
    [
        ["x" * 120],
        ["long " * 30, "b"],
        ["actinic keratoses and intraepithelial carcinoma", "benign keratosis-like lesions"],
    ],
)
def test_no_legend_is_wider_than_its_figure(names):
    counts = np.ones((1, len(names)), int)
    for figure in (partition_figure(counts, names), stages_figure([counts], names)):
        figure.canvas.draw()
        for legend in figure.legends:
            extent = legend.get_window_extent()
            assert 0 <= extent.x0 < extent.x1 <= figure.bbox.width
            assert 0 <= extent.y0 < extent.y1 <= figure.bbox.height


def test_an_escaped_name_is_drawn_like_any_other_text():
    figure = blank_figure(2, 2)
    labelled_axes(figure, NAME, "")
    assert f"<!-- {NAME} -->".encode() in svg(figure)


def test_axes_keep_their_powers_of_ten(tmp_path):
    figure = blank_figure(2, 2)
    axes = labelled_axes(figure, "", "")
    axes.set(xscale="log", xlim=(1e-3, 1))
    save_figure(figure, tmp_path / "a.png")
    assert any("10^{" in label.get_text() for label in axes.get_xticklabels())
