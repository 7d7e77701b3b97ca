"""Figure of a metric over the bytes that were sent so far."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from matplotlib.ticker import LogLocator

from lit_fedad.report.style import DARK, FONT_SIZE, blank_figure, labelled_axes, line_style

_WIDE = 20  # from this ratio of the largest to the smallest on, bytes lie on a logarithmic axis
_APART = 0.1  # between two numbers of rounds, as a share of the axis


class Point(NamedTuple):
    """One evaluation of a run.

    Attributes:
        round: Number of the round.
        sent: Bytes that all clients have sent by its end.
        value: Value of the metric.
    """

    round: int
    sent: int
    value: float


def communication_figure(points: Sequence[Point], ylabel: str) -> Figure:
    """Draws a metric over the bytes sent as one line, with the numbers of rounds as far as there is room.

    Args:
        points: At least one, rounds ascending. Those before anything was sent are left out if the axis is
            logarithmic.
        ylabel: Label of the values.

    Returns:
        The figure.
    """
    figure = blank_figure(3.5, 2.3)
    axes = labelled_axes(figure, "sent by all clients by the end of a round (MB)", ylabel)
    sending = [point for point in points if point.sent > 0]
    if sending and sending[-1].sent >= _WIDE * sending[0].sent:
        points = sending
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter("{x:g}")
    axes.plot([p.sent / 1e6 for p in points], [p.value for p in points], **line_style(0, len(points)))
    axes.margins(x=0.06, y=0.12)
    axes.autoscale_view()
    _number(axes, points)
    return figure


def _number(axes: Axes, points: Sequence[Point]) -> None:
    """Writes the numbers of rounds, from the last one back, where the next one is far enough away."""
    across = axes.transData.transform([(p.sent / 1e6, p.value) for p in points])[:, 0]
    shares = (across - axes.bbox.x0) / axes.bbox.width
    free = math.inf
    for share, point in zip(shares[::-1], points[::-1], strict=True):
        if free - share >= _APART:
            free = share
            text = axes.annotate(
                str(point.round),
                (point.sent / 1e6, point.value),
                xytext=(0, 3),
                textcoords="offset points",
                ha="center",
                fontsize=FONT_SIZE - 1,
                color=DARK,
            )
            text.set_path_effects([withStroke(linewidth=1.5, foreground="white")])
