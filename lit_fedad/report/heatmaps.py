"""Sheets of pictures: anomaly maps beside their images, and the condensed images that clients sent."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import ListedColormap, Normalize, to_rgba_array
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from numpy.typing import ArrayLike

from lit_fedad.report.figures import COLOURS, DARK, FONT_SIZE, LEGEND, blank_figure, legend_mark
from lit_fedad.report.overlay import heat, overlay

_COLOUR_MAP = ListedColormap(heat(np.linspace(0, 1, 256)) / 255)
_CELL, _GAP, _CAPTION, _HEAD, _BAR = 1.25, 0.06, 0.24, 0.4, 0.72  # inches


@dataclass(frozen=True)
class Case:
    """One image and its anomaly map.

    Attributes:
        image: The image as it was scored, uint8 [H, W, 3].
        mask: Non-zero where the image is anomalous, uint8 [H, W]; None if there is no mask.
        anomaly_map: Anomaly score of each pixel [H, W].
        caption: One line under the row.
    """

    image: np.ndarray
    mask: np.ndarray | None
    anomaly_map: np.ndarray
    caption: str


def heatmap_sheet(cases: Sequence[Case], title: str) -> Figure:
    """Draws one row a case: image, mask, anomaly map and overlay, under one colour scale.

    The scale is shared so that rows can be compared; it covers `robust_range` of all maps. If no case has a
    mask, the mask column is left out. The overlay has the outline of the mask.

    Raises:
        ValueError: There is no case.
    """
    if not cases:
        raise ValueError("a heatmap sheet needs at least one case")
    vmin, vmax = robust_range(case.anomaly_map for case in cases)
    norm = Normalize(vmin, vmax)
    masks = any(case.mask is not None for case in cases)
    heads = ["image", *(["mask"] if masks else []), "anomaly map", "overlay"]
    height, width = cases[0].anomaly_map.shape
    cell = min(_CELL * height / width, 2 * _CELL)  # upright strips are shown narrower
    sheet_width = _GAP + len(heads) * (_CELL + _GAP) + _BAR
    sheet_height = _HEAD + len(cases) * (cell + _CAPTION)

    figure = blank_figure(sheet_width, sheet_height)
    figure.set_layout_engine(
        "none"
    )  # cells are placed to the point: captions may run on under their whole row

    def place(left: float, top: float, wide: float, high: float) -> Axes:
        """Adds axes at a place given in inches from the top left corner."""
        bottom = 1 - (top + high) / sheet_height
        return figure.add_axes((left / sheet_width, bottom, wide / sheet_width, high / sheet_height))

    for row, case in enumerate(cases):
        top = _HEAD + row * (cell + _CAPTION)
        for column, head in enumerate(heads):
            axes = place(_GAP + column * (_CELL + _GAP), top, _CELL, cell)
            axes.axis("off")
            if row == 0:
                axes.set_title(head, fontsize=FONT_SIZE, pad=3)
            if head == "image":
                axes.imshow(case.image)
                axes.text(0, -0.03, case.caption, fontsize=FONT_SIZE, va="top", transform=axes.transAxes)
            elif head == "mask":
                _show_mask(axes, case)
            elif head == "anomaly map":
                axes.imshow(case.anomaly_map, cmap=_COLOUR_MAP, norm=norm)
            else:
                axes.imshow(overlay(case.image, case.anomaly_map, vmin, vmax))
                _outline(axes, case)

    bar_height = min(len(cases) * (cell + _CAPTION) - _CAPTION, 3 * _CELL)
    bar = place(sheet_width - _BAR + 0.06, _HEAD, 0.09, bar_height)
    colours = figure.colorbar(ScalarMappable(norm, _COLOUR_MAP), cax=bar, extend="both", extendfrac=0.03)
    colours.ax.tick_params(labelsize=FONT_SIZE, width=0.5, length=2)
    colours.set_label("anomaly score", fontsize=FONT_SIZE)
    colours.outline.set_linewidth(0.5)
    figure.text(_GAP / sheet_width, 1 - 0.05 / sheet_height, title, fontsize=FONT_SIZE + 1, va="top")
    return figure


def robust_range(maps: Iterable[np.ndarray]) -> tuple[float, float]:
    """Computes the ends of a colour scale that a few extreme pixels do not stretch.

    Returns:
        The 2nd and the 99.5th percentile of all values (defects are small, hence the uneven pair); (0, 1) if
        there is no finite value.

    Examples:
        >>> robust_range([np.arange(201.0)])
        (4.0, 199.0)
    """
    values = np.concatenate([np.ravel(anomaly_map) for anomaly_map in maps])
    values = values[np.isfinite(values)]
    if not values.size:
        return 0.0, 1.0
    low, high = np.percentile(values, (2, 99.5))
    return float(low), float(high)


def pick_cases(scores: ArrayLike, labels: ArrayLike, best: int, worst: int) -> list[int]:
    """Picks the images that are most clearly classified correctly and wrongly, without any threshold.

    An image is ranked by the share of the images of the other class against which its score is ordered
    correctly (its own part of the AUROC), ties counting half. Equal ranks are ordered by the distance of the
    score from the median of the other class. Images whose score is not finite are never picked. If a class is
    missing, all ranks are equal and the score alone decides.

    Args:
        scores: Image scores [N], higher is more anomalous.
        labels: 0 for normal, 1 for anomalous [N].
        best: Number of the best images to pick.
        worst: Number of the worst images to pick.

    Returns:
        Indices of the best, best first, then of the worst, worst first. No image is picked twice; if there are
        too few, the best are picked first.

    Examples:
        >>> pick_cases([0.1, 0.9, 0.2, 0.8], [0, 0, 1, 1], best=1, worst=1)
        [0, 1]
    """
    score, label = np.asarray(scores, dtype=float), np.asarray(labels)
    candidates = np.flatnonzero(np.isfinite(score))
    judged = []
    for index in candidates:
        sign = 1 if label[index] else -1
        gaps = sign * (score[index] - score[candidates][label[candidates] != label[index]])
        rank = np.mean((gaps > 0) + 0.5 * (gaps == 0)) if gaps.size else 0.0
        distance = np.median(gaps) if gaps.size else sign * score[index]
        judged.append((-rank, -distance, int(index)))
    order = [index for _, _, index in sorted(judged)]
    return order[:best] + order[best:][::-1][:worst]


def _show_mask(axes: Axes, case: Case) -> None:
    """Draws the mask in black and white, or a note that there is none."""
    if case.mask is None:
        axes.text(0.5, 0.5, "no mask", fontsize=FONT_SIZE, color="0.5", ha="center", va="center")
    else:
        axes.imshow(case.mask > 0, cmap="gray", vmin=0, vmax=1, interpolation="nearest")


def _outline(axes: Axes, case: Case) -> None:
    """Draws the border of the mask as a white line with a dark rim, visible on any ground."""
    if case.mask is not None and 0 < np.count_nonzero(case.mask) < case.mask.size:
        lines = axes.contour(case.mask > 0, levels=[0.5], colors="white", linewidths=0.7)
        lines.set_path_effects([withStroke(linewidth=1.5, foreground="black")])


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
    init = "pca" if np.ptp(points, axis=0).any() else "random"  # equal features have no principal component
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
_SIDE = 0.5  # inches of an image
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
    side = shared[rounds[0]][0].shape[-1]
    gap = max(1, side // 14)
    strips = [[_strip(*shared[round], label, each, gap) for round in rounds] for label in labels]
    wide, high = each * (side + gap) + 2 * gap, side + gap  # of a cell; rounds are three gaps apart
    sheet = np.ones((len(labels) * high - gap, len(rounds) * wide - 3 * gap, 3))
    for row, strip_row in enumerate(strips):
        for column, strip in enumerate(strip_row):
            sheet[row * high : row * high + side, column * wide : column * wide + strip.shape[1]] = strip

    names = [textwrap.fill(classes[label], _NAME) for label in labels]
    inches = np.array(sheet.shape[:2]) / side * _SIDE
    letters = max(len(line) for name in names for line in name.splitlines())
    figure = blank_figure(inches[1] + 0.3 + FONT_SIZE * 0.62 * letters / 72, inches[0] + 0.35)
    axes = figure.add_subplot()
    axes.imshow(sheet)
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0, labelsize=FONT_SIZE, labeltop=True, labelbottom=False, pad=3)
    axes.set_yticks([row * high + side / 2 - 0.5 for row in range(len(labels))], names)
    middles = [column * wide + (wide - 3 * gap) / 2 - 0.5 for column in range(len(rounds))]
    axes.set_xticks(middles, [f"round {round}" for round in rounds])
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
    side = images.shape[-1]
    strip = np.ones((side, each * (side + gap) - gap, 3))
    own = images[labels == label]
    places = range(0, strip.shape[1], side + gap)
    for place, image in zip(places, own[evenly(len(own), each)], strict=False):
        strip[:, place : place + side] = image.transpose(1, 2, 0) / 255
    for place in places[len(own) :]:
        strip[:, place : place + side] = _EMPTY
    return strip
