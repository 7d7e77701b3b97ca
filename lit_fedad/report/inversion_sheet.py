"""Sheet of reconstructions beside the private images that they are nearest to."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.figure import Figure

from lit_fedad.report.style import FONT_SIZE, blank_figure

_CELL, _CAPTION, _HEAD = 1.4, 0.2, 0.45  # inches


class Shown(NamedTuple):
    """One image of the sheet.

    Attributes:
        image: Values in [0, 1], [H, W] or [H, W, 3].
        caption: One line under it.
    """

    image: np.ndarray
    caption: str


def inversion_sheet(rows: Sequence[Sequence[Shown]], heads: Sequence[str], title: str) -> Figure:
    """Draws a grid of images with a caption under each.

    Args:
        rows: At least one, each with one image a column.
        heads: Heading of each column.
        title: Heading of the sheet.

    Returns:
        The figure.
    """
    height, width = rows[0][0].image.shape[:2]
    cell = _CELL * height / width
    figure = blank_figure(len(heads) * _CELL, _HEAD + len(rows) * (cell + _CAPTION))
    panels = figure.subplots(len(rows), len(heads), squeeze=False)
    for row, places in zip(rows, panels, strict=True):
        for shown, axes in zip(row, places, strict=True):
            axes.imshow(shown.image, cmap="gray", vmin=0, vmax=1, interpolation="nearest")
            axes.set(xticks=[], yticks=[])
            axes.spines[:].set_visible(False)
            axes.set_xlabel(shown.caption, fontsize=FONT_SIZE, labelpad=2)
    for head, axes in zip(heads, panels[0], strict=True):
        axes.set_title(head, fontsize=FONT_SIZE, pad=3)
    figure.suptitle(title, fontsize=FONT_SIZE + 1)
    return figure
