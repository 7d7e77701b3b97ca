"""Pictures that runs drew themselves, side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from PIL import Image

from lit_fedad.report.style import FONT_SIZE, blank_figure

_WIDTH = 5.0  # inches of a picture
_BLANK = 0.2  # height over width of a picture that is not there


def sheets_figure(
    rows: Sequence[str], columns: Sequence[str], pictures: Mapping[tuple[str, str], Path]
) -> Figure:
    """Draws a grid of pictures.

    Args:
        rows: Labels of the rows.
        columns: Labels of the columns.
        pictures: Picture files by labels of row and column.

    Returns:
        The figure; a place without a picture says so.
    """
    held = {}
    for place, file in pictures.items():
        with Image.open(file) as image:
            held[place] = np.asarray(image.convert("RGB"))
    heights = [
        max(
            (held[row, c].shape[0] / held[row, c].shape[1] for c in columns if (row, c) in held),
            default=_BLANK,
        )
        for row in rows
    ]
    figure = blank_figure(_WIDTH * len(columns), sum(_WIDTH * height + 0.3 for height in heights))
    grid = figure.add_gridspec(len(rows), len(columns), height_ratios=heights)
    for line, row in enumerate(rows):
        for number, column in enumerate(columns):
            axes = figure.add_subplot(grid[line, number])
            axes.set_axis_off()
            axes.set_title(f"{row}, {column}", fontsize=FONT_SIZE + 2)
            if (row, column) in held:
                axes.imshow(held[row, column], interpolation="antialiased")
            else:
                axes.text(0.5, 0.5, "no run with pictures", ha="center", va="center", fontsize=FONT_SIZE)
    return figure
