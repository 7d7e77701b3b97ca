"""Figure of condensed images among real ones in the plane."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.colors import to_rgba_array
from matplotlib.figure import Figure
from numpy.typing import ArrayLike

from lit_fedad.report.style import COLOURS, DARK, FONT_SIZE, LEGEND, blank_figure, legend_mark

_MOST_NAMES = 20


def knowledge_plane(
    places: ArrayLike, labels: ArrayLike, condensed: ArrayLike, classes: Sequence[str]
) -> Figure:
    """Draws the positions of images; the colour shows the class, the mark whether the image is condensed.

    More than 20 classes are counted instead of named.

    Args:
        places: Positions of the images [n, 2].
        labels: Class of each image [n].
        condensed: Whether each image is condensed, else real, bool [n].
        classes: Names of the classes.

    Returns:
        The figure.
    """
    place, label, made = np.asarray(places), np.asarray(labels), np.asarray(condensed, dtype=bool)
    colours = class_colours(len(classes))
    size = float(np.clip(4000 / len(place), 5, 16))
    named = len(classes) <= _MOST_NAMES
    columns = 2 if named and max(map(len, classes)) > 14 else 4
    figure = blank_figure(3.5, 3.5 + 0.15 * (math.ceil(len(classes) / columns) if named else 1))
    axes = figure.add_subplot()
    looks: tuple[tuple[np.ndarray, dict[str, Any]], ...] = (
        (~made, {"marker": "o", "s": size, "linewidths": 0, "alpha": 0.65}),
        (made, {"marker": "X", "s": 2 * size, "linewidths": 0.4, "edgecolors": DARK}),
    )
    for chosen, look in looks:
        axes.scatter(place[chosen, 0], place[chosen, 1], c=colours[label[chosen]], **look)
    kinds = [
        legend_mark(f"real test image ({(~made).sum()})", color="0.5", marker="o", markeredgewidth=0),
        legend_mark(f"condensed image ({made.sum()})", color="0.5", marker="X", markeredgecolor=DARK),
    ]
    axes.set(xticks=[], yticks=[], box_aspect=1)
    axes.spines[:].set(color="0.6", linewidth=0.6)
    figure.legend(handles=kinds, loc="outside upper center", ncols=2, **LEGEND)
    if named:
        names = [
            legend_mark(name, color=colour, marker="s") for name, colour in zip(classes, colours, strict=True)
        ]
        figure.legend(handles=names, loc="outside lower center", ncols=columns, **LEGEND)
    else:
        axes.set_xlabel(f"colours: {len(classes)} classes", fontsize=FONT_SIZE)
    return figure


def class_colours(number: int) -> np.ndarray:
    """Returns one colour a class, from the common palette or, for more classes, a larger one.

    Args:
        number: Number of classes.

    Returns:
        Red, green, blue and opacity in [0, 1] [number, 4].
    """
    if number <= len(COLOURS):
        return to_rgba_array(COLOURS[:number])
    if number <= _MOST_NAMES:
        strong_first = [*range(0, 20, 2), *range(1, 20, 2)]
        return colormaps["tab20"](strong_first[:number])
    return colormaps["turbo"](np.linspace(0, 1, number))
