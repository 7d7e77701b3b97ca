"""Anomaly maps beside the images they were computed from: sheets, and the choice of cases."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import ListedColormap, Normalize
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from numpy.typing import ArrayLike

from lit_fedad.report.overlay import heat, overlay
from lit_fedad.report.style import FONT_SIZE, as_written, blank_figure

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

    Args:
        cases: At least one.
        title: One line above all rows.
    """
    vmin, vmax = robust_range(case.anomaly_map for case in cases)
    norm = Normalize(vmin, vmax)
    masks = any(case.mask is not None for case in cases)
    heads = ["image", *(["mask"] if masks else []), "anomaly map", "overlay"]
    height, width = cases[0].anomaly_map.shape
    cell = min(_CELL * height / width, 2 * _CELL)  # upright strips are shown narrower
    sheet_width = _GAP + len(heads) * (_CELL + _GAP) + _BAR
    sheet_height = _HEAD + len(cases) * (cell + _CAPTION)

    figure = blank_figure(sheet_width, sheet_height)
    # Cells are placed by hand, because a caption may be as long as its whole row.
    figure.set_layout_engine("none")

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
                caption = as_written(case.caption)
                axes.text(0, -0.03, caption, fontsize=FONT_SIZE, va="top", transform=axes.transAxes)
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
    place_of_title = (_GAP / sheet_width, 1 - 0.05 / sheet_height)
    figure.text(*place_of_title, as_written(title), fontsize=FONT_SIZE + 1, va="top")
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
    score, anomalous = score[candidates], label[candidates] != 0
    rank, distance = np.zeros(len(score)), np.where(anomalous, score, -score)
    for of_label, sign in ((anomalous, 1), (~anomalous, -1)):
        # With its sign, an image of either class is ordered correctly above the others.
        scores_of_label, others = sign * score[of_label], np.sort(sign * score[~of_label])
        if others.size:
            below, up_to = (np.searchsorted(others, scores_of_label, side) for side in ("left", "right"))
            rank[of_label] = (below + up_to) / (2 * len(others))  # ties count half
            middle = others[[(len(others) - 1) // 2, len(others) // 2]]
            distance[of_label] = (scores_of_label[:, None] - middle).mean(1)
    order = candidates[np.lexsort((candidates, -distance, -rank))].tolist()
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
