"""Distance correlations between samples as annotated heatmaps (FADngs Fig. 9)."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib import colormaps
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from numpy.typing import ArrayLike

from lit_fedad.report.figures import save_figure
from lit_fedad.report.style import FONT_SIZE, blank_figure

_COLOUR_MAP = colormaps["cividis"]  # the same to the eye with and without red-green blindness
_NORM = Normalize(0, 1)


def draw_correlation_heatmap(
    path: Path, names: Sequence[str], r_squared: ArrayLike, r: ArrayLike, corrected: ArrayLike
) -> Figure:
    """Draws plain R^2, plain R and bias-corrected R^2 side by side, under one colour scale from 0 to 1.

    Negative values, which only the corrected estimate has, are printed as they are and coloured as 0.

    Args:
        path: PNG file to write; missing folders are created.
        names: Names of the k rows and columns.
        r_squared: Plain R^2 (FADngs Eq. 18) [k, k].
        r: Plain R [k, k].
        corrected: Bias-corrected R^2 [k, k].

    Returns:
        The figure as it was written.
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
    save_figure(figure, path)
    return figure
