"""A table as a picture: one line a data set over its rows."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd
from matplotlib.figure import Figure

from lit_fedad.report.console import metric_title
from lit_fedad.report.figures import LEGEND, blank_figure, labelled_axes, line_style
from lit_fedad.report.tables import Table


def rows_figure(table: Table, columns: Sequence[str], runs: pd.DataFrame) -> Figure:
    """The table's first metric in the last round: means over seeds, with sample standard deviations as bars.

    Args:
        table: Its rows, in this order, are the points of each line.
        columns: One line each.
        runs: From `lit_fedad.report.tables.runs_frame`.

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
