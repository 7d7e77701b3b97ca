"""Figures of a paper's table: its metric by row, stage or round, or pictures that runs drew themselves."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from lit_fedad.report.naming import METRIC_TITLES, metric_title
from lit_fedad.report.run_figures import stored_picture
from lit_fedad.report.style import FONT_SIZE, LEGEND, as_written, blank_figure, labelled_axes, line_style
from lit_fedad.report.tables import Outcome, Table


def rows_figure(table: Table, columns: Sequence[str], runs: pd.DataFrame) -> Figure:
    """Draws the table's first metric in the last round: means over seeds, sample standard deviations as bars."""
    metric, labels = table.metrics[0], [row.label for row in table.rows]
    figure = blank_figure(3.5, 2.3)
    axes = labelled_axes(figure, table.rows_are, f"{metric_title(metric)} (%)")
    for index, column in enumerate(columns):
        values = 100 * runs[runs["column"] == column].groupby("row")[f"{metric}_last"].agg(["mean", "std"])
        values = values.reindex(labels)
        style = line_style(index, len(labels))
        # One seed has no deviation, hence no bar.
        axes.errorbar(range(len(labels)), values["mean"], values["std"], label=as_written(column), **style)
    axes.set_xticks(range(len(labels)), list(map(as_written, labels)))
    figure.legend(loc="outside right upper", **LEGEND)
    return figure


def tasks_figure(table: Table, columns: Sequence[str], runs: pd.DataFrame) -> Figure:
    """Draws the table's first metric after each stage: means over seeds, sample standard deviations as bars."""
    metric = table.metrics[0]
    labels = [row.label for row in table.rows if row.label in set(runs["row"])]
    stages = [name for name in map(str, runs) if name.startswith(f"{metric}_task_")]
    numbers = [int(name.rpartition("_")[2]) for name in stages]
    num_columns = min(len(columns), 3)
    num_rows = math.ceil(len(columns) / num_columns)
    figure = blank_figure(max(3.5, 7.16 * num_columns / 3), 1.8 * num_rows + 0.3)
    for panel, column in enumerate(columns, start=1):
        axes = labelled_axes(figure, "task", f"{metric_title(metric)} (%)", (num_rows, num_columns, panel))
        axes.set_title(as_written(column), fontsize=FONT_SIZE + 1)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        for index, label in enumerate(labels):
            group = runs[(runs["row"] == label) & (runs["column"] == column)]
            means, deviations = 100 * group[stages].mean(), 100 * group[stages].std()
            axes.errorbar(
                numbers, means, deviations, label=as_written(label), **line_style(index, len(stages))
            )
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=4, **LEGEND)
    return figure


_TITLES = {
    "loss": "training loss",
    "last_loss": "loss of the last step",
    "knowledge_mmd": "change (squared MMD)",
}
_COLUMNS = ("row", "column", "seed", "quantity", "client", "round", "value")
_WIDTH, _HEIGHT = 2.4, 1.8  # inches of a panel


def rounds_frame(table: Table, outcomes: Sequence[Outcome]) -> pd.DataFrame:
    """Lists the table's quantities by round.

    Returns:
        One line for each run, quantity, client and round; ``client`` is empty for a mean over clients.
    """
    values = {"clients": _losses, "rounds": _means}[table.figure]
    lines = [
        (outcome.row, outcome.column, outcome.seed, quantity, client, round, value)
        for outcome in outcomes
        if outcome.result
        for quantity in table.quantities
        for client, round, value in values(outcome.result, quantity, outcome.ending)
    ]
    return pd.DataFrame(lines, columns=list(_COLUMNS))


def rounds_figure(table: Table, columns: Sequence[str], frame: pd.DataFrame) -> Figure:
    """Draws one line a row over the rounds: means over seeds."""
    labels = [row.label for row in (*table.rows, *table.beyond) if row.label in set(frame["row"])]
    if table.figure == "clients":
        clients = sorted(frame["client"].unique(), key=int) or ["0"]
        panels = [[("loss", column, client) for client in clients] for column in columns]
    else:
        panels = [[(quantity, column, "") for column in columns] for quantity in table.quantities]
    num_rows, num_columns = len(panels), len(panels[0])
    figure = blank_figure(max(3.5, _WIDTH * num_columns), _HEIGHT * num_rows + 0.5)
    for number, (quantity, column, client) in enumerate((p for line in panels for p in line), start=1):
        is_share = quantity in METRIC_TITLES
        title = f"{metric_title(quantity)} (%)" if is_share else _TITLES.get(quantity, quantity)
        axes = labelled_axes(figure, "round", title, (num_rows, num_columns, number))
        panel = f"{column}, client {client}" if client else column
        axes.set_title(as_written(panel), fontsize=FONT_SIZE + 1)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        in_panel = (frame["quantity"] == quantity) & (frame["column"] == column) & (frame["client"] == client)
        for index, label in enumerate(labels):
            values = frame[in_panel & (frame["row"] == label)].groupby("round")["value"]
            means = (100 if is_share else 1) * values.mean()
            axes.plot(means.index, means, label=as_written(label), **line_style(index, len(means)))
    axes = figure.axes[0]
    if labels:
        figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=4, **LEGEND)
    return figure


def _means(result: Mapping[str, Any], quantity: str, ending: str) -> Iterator[tuple[str, int, float]]:
    """Yields a metric of each evaluation, or a scalar of each round, that is known."""
    metrics = {int(round): values.get(f"{quantity}{ending}") for round, values in result["metrics"].items()}
    scalars = {
        round: values.get(quantity)
        for round, values in zip(result["exchanges"], result["scalars"], strict=True)
    }
    known = metrics if any(value is not None for value in metrics.values()) else scalars
    for round, value in sorted(known.items()):
        if value is not None and math.isfinite(value):
            yield "", round, value


def _losses(result: Mapping[str, Any], quantity: str, ending: str) -> Iterator[tuple[str, int, float]]:
    """Yields each client's loss of each round in which it trained."""
    by_round = zip(result["exchanges"], result.get("client_losses", ()), strict=False)
    for round, losses in by_round:
        for client, value in losses.items():
            if value is not None and math.isfinite(value):
                yield client, round, value


_PICTURE = 5.0  # inches of a picture
_BLANK = 0.2  # height over width of a picture that is not there


def sheets_figure(
    rows: Sequence[str], columns: Sequence[str], pictures: Mapping[tuple[str, str], Path]
) -> Figure:
    """Draws a grid of pictures.

    Raises:
        UserError: As `stored_picture`.
    """
    images = {cell: np.asarray(stored_picture(file)) for cell, file in pictures.items()}
    ratios = {cell: picture.shape[0] / picture.shape[1] for cell, picture in images.items()}
    heights = [max((ratios[row, c] for c in columns if (row, c) in images), default=_BLANK) for row in rows]
    figure = blank_figure(_PICTURE * len(columns), sum(_PICTURE * height + 0.3 for height in heights))
    grid = figure.add_gridspec(len(rows), len(columns), height_ratios=heights)
    for line, row in enumerate(rows):
        for number, column in enumerate(columns):
            axes = figure.add_subplot(grid[line, number])
            axes.set_axis_off()
            axes.set_title(as_written(f"{row}, {column}"), fontsize=FONT_SIZE + 2)
            if (row, column) in images:
                axes.imshow(images[row, column], interpolation="antialiased")
            else:
                axes.text(0.5, 0.5, "no run with pictures", ha="center", va="center", fontsize=FONT_SIZE)
    return figure
