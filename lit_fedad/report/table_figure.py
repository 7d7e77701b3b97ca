"""Figures of a paper's table: one line a column over its rows, or one line a row over the stages."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from lit_fedad.report.naming import metric_title
from lit_fedad.report.style import FONT_SIZE, LEGEND, blank_figure, labelled_axes, line_style
from lit_fedad.report.tables import Table


def rows_figure(table: Table, columns: Sequence[str], runs: pd.DataFrame) -> Figure:
    """Draws the table's first metric in the last round: means over seeds, sample standard deviations as bars.

    Args:
        table: The table; its rows, in their order, are the points of each line.
        columns: Label of each column, which is one line.
        runs: Runs, from `lit_fedad.report.tables.runs_frame`.

    Returns:
        The figure.
    """
    metric, labels = table.metrics[0], [row.label for row in table.rows]
    figure = blank_figure(3.5, 2.3)
    axes = labelled_axes(figure, table.rows_are, f"{metric_title(metric)} (%)")
    for index, column in enumerate(columns):
        values = 100 * runs[runs["column"] == column].groupby("row")[f"{metric}_last"].agg(["mean", "std"])
        values = values.reindex(labels)
        style = line_style(index, len(labels))
        # One seed has no deviation, hence no bar.
        axes.errorbar(range(len(labels)), values["mean"], values["std"], label=column, **style)
    axes.set_xticks(range(len(labels)), labels)
    figure.legend(loc="outside right upper", **LEGEND)
    return figure


def tasks_figure(table: Table, columns: Sequence[str], runs: pd.DataFrame) -> Figure:
    """Draws the table's first metric after each stage: means over seeds, sample standard deviations as bars.

    Args:
        table: The table; its rows are the lines, without those that no run belongs to.
        columns: Label of each column, which is one panel.
        runs: Runs, from `lit_fedad.report.tables.runs_frame`.

    Returns:
        The figure.
    """
    metric = table.metrics[0]
    labels = [row.label for row in table.rows if row.label in set(runs["row"])]
    stages = [name for name in map(str, runs) if name.startswith(f"{metric}_task_")]
    numbers = [int(name.rpartition("_")[2]) for name in stages]
    wide = min(len(columns), 3)
    high = math.ceil(len(columns) / wide)
    figure = blank_figure(max(3.5, 7.16 * wide / 3), 1.8 * high + 0.3)
    for panel, column in enumerate(columns, start=1):
        axes = labelled_axes(figure, "task", f"{metric_title(metric)} (%)", (high, wide, panel))
        axes.set_title(column, fontsize=FONT_SIZE + 1)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        for index, label in enumerate(labels):
            group = runs[(runs["row"] == label) & (runs["column"] == column)]
            means, deviations = 100 * group[stages].mean(), 100 * group[stages].std()
            axes.errorbar(numbers, means, deviations, label=label, **line_style(index, len(stages)))
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=4, **LEGEND)
    return figure
