"""Figures of attacks: ROC curves, distance correlations, reconstructions beside the nearest private images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from matplotlib import colormaps
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from numpy.typing import ArrayLike

from lit_fedad.report.style import DARK, FONT_SIZE, LEGEND, blank_figure, labelled_axes


def roc_figure(curves: Mapping[str, tuple[np.ndarray, np.ndarray]], auc: Mapping[str, float]) -> Figure:
    """Draws one line for each curve, named with its area, and guessing.

    Rates of 0, which a logarithmic axis cannot show, are left out.
    """
    figure = blank_figure(3.5, 2.9)
    axes = labelled_axes(figure, "false positive rate", "true positive rate")
    axes.set(xscale="log", yscale="log")
    lowest = 1.0
    for number, (name, rates) in enumerate(curves.items()):
        false, true = (np.where(rate > 0, rate, np.nan) for rate in rates)
        lowest = min(lowest, np.nanmin(false), np.nanmin(true))
        shade = DARK if number == 0 else str(0.3 + 0.3 * number / len(curves))
        axes.step(
            false,
            true,
            where="post",
            color=shade,
            linewidth=1.8 / (1 + number),
            label=f"{name}, AUC {auc[name]:.3f}",
        )
    axes.plot([lowest, 1], [lowest, 1], color="0.5", linewidth=0.8, linestyle="--", label="guessing")
    axes.set(xlim=(lowest, 1), ylim=(lowest, 1.05))
    figure.legend(loc="outside upper center", ncols=1, **LEGEND)
    return figure


_COLOUR_MAP = colormaps["cividis"]  # looks the same with and without red-green blindness
_NORM = Normalize(0, 1)


def correlation_figure(
    names: Sequence[str], r_squared: ArrayLike, r: ArrayLike, corrected: ArrayLike
) -> Figure:
    """Draws plain R^2, plain R and bias-corrected R^2 side by side, under one colour scale from 0 to 1.

    Negative values, which only the corrected estimate has, are printed as they are and coloured as 0.

    Args:
        names: Names of the k rows and columns.
        r_squared: Plain R^2 (FADngs Eq. 18) [k, k].
        r: Plain R [k, k].
        corrected: Bias-corrected R^2 [k, k].
    """
    figure = blank_figure(7.16, 2.6)
    panels = figure.subplots(1, 3, sharey=True)
    titles = ("$R^2$ (FADngs Eq. 18)", "$R$", "$R^2$, bias-corrected")
    for axes, title, matrix in zip(panels, titles, (r_squared, r, corrected), strict=True):
        values = np.asarray(matrix, dtype=float)
        axes.imshow(values, cmap=_COLOUR_MAP, norm=_NORM)
        for (row, column), value in np.ndenumerate(values):
            colour = "white" if value < 0.55 else "black"
            text = f"{value:z.3f}"
            axes.text(column, row, text, color=colour, ha="center", va="center", fontsize=FONT_SIZE - 1)
        axes.set_title(title, fontsize=FONT_SIZE + 1)
        axes.set_xticks(range(len(names)), names, rotation=40, ha="right", rotation_mode="anchor")
        axes.set_yticks(range(len(names)), names)
        axes.tick_params(labelsize=FONT_SIZE, length=0)
        axes.spines[:].set_visible(False)
    bar = figure.colorbar(ScalarMappable(_NORM, _COLOUR_MAP), ax=panels, shrink=0.7, aspect=25, pad=0.01)
    bar.ax.tick_params(labelsize=FONT_SIZE, width=0.5, length=2)
    bar.outline.set_visible(False)
    return figure


_CELL, _CAPTION, _HEAD = 1.4, 0.2, 0.45  # inches


class Shown(NamedTuple):
    """One image of the sheet.

    Attributes:
        image: Values in [0, 1], [H, W] or [H, W, 3].
    """

    image: np.ndarray
    caption: str


def inversion_sheet(rows: Sequence[Sequence[Shown]], heads: Sequence[str], title: str) -> Figure:
    """Draws a grid of images with a caption under each."""
    height, width = rows[0][0].image.shape[:2]
    cell = _CELL * height / width
    figure = blank_figure(len(heads) * _CELL, _HEAD + len(rows) * (cell + _CAPTION))
    panels = figure.subplots(len(rows), len(heads), squeeze=False)
    for row, panel_row in zip(rows, panels, strict=True):
        for cell_image, axes in zip(row, panel_row, strict=True):
            axes.imshow(cell_image.image, cmap="gray", vmin=0, vmax=1, interpolation="nearest")
            axes.set(xticks=[], yticks=[])
            axes.spines[:].set_visible(False)
            axes.set_xlabel(cell_image.caption, fontsize=FONT_SIZE, labelpad=2)
    for head, axes in zip(heads, panels[0], strict=True):
        axes.set_title(head, fontsize=FONT_SIZE, pad=3)
    figure.suptitle(title, fontsize=FONT_SIZE + 1)
    return figure
