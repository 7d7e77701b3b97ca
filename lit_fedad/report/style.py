"""Common style of all figures: fonts, colours, lines, axes and legends.

Figures are drawn through matplotlib's object interface: nothing here uses pyplot or its global state, so figures
can be drawn in any thread or process.
"""

import textwrap
from collections.abc import Iterable
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure, FigureBase
from matplotlib.lines import Line2D

from lit_fedad.core.text import printable_lines

FONT_SIZE = 7  # points: the smallest text of a figure that is printed at its own size

# The palette of Okabe and Ito (2008), made to be told apart with any kind of colour vision. Its black is kept
# for means and thresholds; its yellow comes last because it is too pale for a line.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442")
DARK = "#222222"
_MARKERS = ("o", "s", "^", "D", "v", "P")
_LINE_STYLES = ("-", "--", ":", "-.")

LEGEND: dict[str, Any] = {
    "fontsize": FONT_SIZE,
    "frameon": False,
    "handlelength": 1.8,
    "columnspacing": 1.2,
    "labelspacing": 0.3,
}


def blank_figure(width: float, height: float) -> Figure:
    """Creates an empty figure of a width and height in inches in the common style, on an Agg canvas.

    Returns:
        A figure with constrained layout at 200 dots an inch.
    """
    figure = Figure(figsize=(width, height), dpi=200, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def as_written(text: str) -> str:
    r"""Escapes characters of names that matplotlib cannot draw as they are.

    These are dollar signs, between which it reads formulas, and characters that are not printable.

    Example:
        >>> print(as_written("$5_$6"), as_written("a\x1b[2J"))
        \$5_\$6 a\x1b[2J
    """
    return printable_lines(text).replace("$", r"\$")


def wrapped(names: Iterable[str], width: int) -> list[str]:
    """Writes names that are longer than a picture has room for in several lines."""
    return [as_written(textwrap.fill(name, width, break_on_hyphens=False)) for name in names]


def lines_of(name: str) -> int:
    """Counts the lines of a name."""
    return name.count("\n") + 1


def labelled_axes(
    figure: FigureBase, xlabel: str, ylabel: str, subplot: tuple[int, int, int] = (1, 1, 1), **shared: Any
) -> Axes:
    """Adds axes in the common style to a figure; ``subplot`` is rows, columns and number of the subplot, from 1."""
    axes = figure.add_subplot(*subplot, **shared)
    style_axes(axes)
    axes.set_xlabel(as_written(xlabel), fontsize=FONT_SIZE + 1)
    axes.set_ylabel(as_written(ylabel), fontsize=FONT_SIZE + 1)
    return axes


def style_axes(axes: Axes) -> None:
    """Brings axes to the common style: thin lines at the left and below, and a grid along y."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set(color=DARK, linewidth=0.6)
    axes.tick_params(labelsize=FONT_SIZE, color=DARK, width=0.6, length=2.5)
    axes.grid(axis="y", color="0.9", linewidth=0.5)
    axes.set_axisbelow(True)


def line_style(index: int, points: int) -> dict[str, Any]:
    """Returns the look of one client's line.

    Args:
        index: Position of the client; colours and markers are used in turn, then again with the next line style.
        points: Number of points of the line; above 30 there are no markers.
    """
    turn, colour = divmod(index, len(_MARKERS))
    marker = _MARKERS[colour] if points <= 30 else None
    style = {"color": COLOURS[colour], "linestyle": _LINE_STYLES[turn % len(_LINE_STYLES)], "linewidth": 0.9}
    return style | {"marker": marker, "markersize": 3, "markeredgewidth": 0}


def legend_mark(label: str, **look: Any) -> Line2D:
    """Creates a mark without a line, for a legend; dollar signs of names must be escaped."""
    return Line2D([], [], linestyle="", markersize=4, label=label, **look)
