"""Figures of condensed images: in the plane beside real ones, and as a sheet by class and round."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.colors import to_rgba_array
from matplotlib.figure import Figure
from numpy.typing import ArrayLike

from lit_fedad.report.style import (
    COLOURS,
    DARK,
    FONT_SIZE,
    LEGEND,
    as_written,
    blank_figure,
    legend_mark,
    lines_of,
    wrapped,
)


def tsne_layout(features: ArrayLike) -> np.ndarray:
    """Lays features out in the plane with t-SNE.

    On one machine the same features always have the same places. On CPUs of different kinds they need not: t-SNE
    amplifies differences in rounding until groups lie elsewhere. Only neighbourhoods mean something.

    Args:
        features: [n, D] with n >= 4; up to about 2,000 take well under a minute.

    Returns:
        Places [n, 2].
    """
    from sklearn.manifold import TSNE  # takes long to import; few runs draw a layout

    points = np.asarray(features, dtype=np.float32)
    perplexity = min(30.0, len(points) / 4)
    # Equal features have no principal component, and a single one has no second.
    init = "pca" if points.shape[1] > 1 and np.ptp(points, axis=0).any() else "random"
    return np.asarray(TSNE(perplexity=perplexity, init=init, random_state=0).fit_transform(points))


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
    """
    place, label, made = np.asarray(places), np.asarray(labels), np.asarray(condensed, dtype=bool)
    colours = class_colours(len(classes))
    size = float(np.clip(4000 / len(place), 5, 16))
    named = len(classes) <= _MOST_NAMES
    names = wrapped(classes, 50)
    longest = max(map(len, classes))
    columns = 4 if longest <= 14 else 2 if longest <= 32 else 1
    rows = math.ceil(len(classes) / columns) * max(map(lines_of, names)) if named else 1
    figure = blank_figure(3.5, 3.5 + 0.15 * rows)
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
        marks = [
            legend_mark(name, color=colour, marker="s") for name, colour in zip(names, colours, strict=True)
        ]
        figure.legend(handles=marks, loc="outside lower center", ncols=columns, **LEGEND)
    else:
        axes.set_xlabel(f"colours: {len(classes)} classes", fontsize=FONT_SIZE)
    return figure


def class_colours(number: int) -> np.ndarray:
    """Returns one colour a class, from the common palette or, for more classes, a larger one.

    Returns:
        Red, green, blue and opacity in [0, 1] [number, 4].
    """
    if number <= len(COLOURS):
        return to_rgba_array(COLOURS[:number])
    if number <= _MOST_NAMES:
        strong_first = [*range(0, 20, 2), *range(1, 20, 2)]
        return colormaps["tab20"](strong_first[:number])
    return colormaps["turbo"](np.linspace(0, 1, number))


_MOST_ROUNDS, _MOST_CLASSES = 8, 20
_ACROSS = 12  # images side by side, of all rounds together
_SIDE = 0.5  # inches of an image's longer side
_NAME = 22  # letters in a line
_EMPTY = 0.93  # grey where a class has no image


def knowledge_sheet(shared: Mapping[int, tuple[np.ndarray, np.ndarray]], classes: Sequence[str]) -> Figure:
    """Draws one row a class and one column a round, with a few images in each cell, evenly spaced over the clients.

    Up to 8 rounds and 20 classes are shown, evenly spaced, the first and the last among them. Cells without an
    image are pale.

    Args:
        shared: Images uint8 of 1 or 3 channels [n, C, H, W] and labels [n] of each round, by its number; at least
            one round.
        classes: Names of the classes.
    """
    rounds = [sorted(shared)[i] for i in evenly(len(shared), _MOST_ROUNDS)]
    labels = evenly(len(classes), _MOST_CLASSES)
    each = int(np.clip(_ACROSS // len(rounds), 1, 4))
    tall, side = shared[rounds[0]][0].shape[-2:]
    gap = max(1, side // 14)
    strips = [[_strip(*shared[round], label, each, gap) for round in rounds] for label in labels]
    wide, high = each * (side + gap) + 2 * gap, tall + gap  # of a cell; rounds are three gaps apart
    sheet = np.ones((len(labels) * high - gap, len(rounds) * wide - 3 * gap, 3))
    for row, strip_row in enumerate(strips):
        for column, strip in enumerate(strip_row):
            sheet[row * high : row * high + tall, column * wide : column * wide + strip.shape[1]] = strip

    names = [as_written(textwrap.fill(classes[label], _NAME)) for label in labels]
    inches = np.array(sheet.shape[:2]) / max(tall, side) * _SIDE
    letters = max(len(line) for name in names for line in name.splitlines())
    figure = blank_figure(inches[1] + 0.3 + FONT_SIZE * 0.62 * letters / 72, inches[0] + 0.35)
    axes = figure.add_subplot()
    axes.imshow(sheet)
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0, labelsize=FONT_SIZE, labeltop=True, labelbottom=False, pad=3)
    axes.set_yticks([row * high + tall / 2 - 0.5 for row in range(len(labels))], names)
    middles = [column * wide + (wide - 3 * gap) / 2 - 0.5 for column in range(len(rounds))]
    axes.set_xticks(middles, [f"round {round}" for round in rounds])
    figure.draw_without_rendering()  # one pass of the layout is only near: long names would be cut
    return figure


def evenly(count: int, most: int) -> list[int]:
    """Chooses evenly spaced numbers below ``count``, the first and the last among them.

    Example:
        >>> evenly(3, 8), evenly(100, 5)
        ([0, 1, 2], [0, 25, 50, 74, 99])
    """
    return np.linspace(0, count - 1, min(count, most)).round().astype(int).tolist()


def _strip(images: np.ndarray, labels: np.ndarray, label: int, each: int, gap: int) -> np.ndarray:
    """Places images of a class side by side, with three channels."""
    tall, side = images.shape[-2:]
    strip = np.ones((tall, each * (side + gap) - gap, 3))
    own = images[labels == label]
    places = range(0, strip.shape[1], side + gap)
    for place, image in zip(places, own[evenly(len(own), each)], strict=False):
        strip[:, place : place + side] = image.transpose(1, 2, 0) / 255
    for place in places[len(own) :]:
        strip[:, place : place + side] = _EMPTY
    return strip
