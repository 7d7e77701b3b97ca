"""Figures of decisions, drift and attacks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from numpy.typing import ArrayLike

from lit_fedad.report.figures import (
    COLOURS,
    DARK,
    FONT_SIZE,
    LEGEND,
    blank_figure,
    labelled_axes,
    save_figure,
)

_BINS = 20


def drift_figure(
    p_values: Sequence[float],
    log_martingale: Sequence[float],
    statistic: Sequence[float],
    alarms: Sequence[int],
    run_length: float,
) -> Figure:
    """Draws the p-values of a stream as a histogram, and martingale and Shiryaev-Roberts statistic over its images.

    Args:
        p_values: P-value of each image, uniform without drift [n].
        log_martingale: Logarithm of the test martingale after each image, to base 10 [n].
        statistic: Shiryaev-Roberts statistic after each image [n].
        alarms: Numbers of the images, from 1, that raised an alarm.
        run_length: Statistic at which an alarm is raised.
    """
    figure = blank_figure(7.16, 4.6)
    share = labelled_axes(figure, "p-value in the stream", "images", (2, 1, 1))
    share.hist(p_values, np.linspace(0, 1, _BINS + 1).tolist(), color=COLOURS[0], linewidth=0)
    expected = len(p_values) / _BINS
    share.axhline(expected, color=DARK, linewidth=0.8, linestyle="--", label="expected without drift")
    share.set(xlim=(0, 1))
    share.legend(loc="upper right", **LEGEND)
    over = labelled_axes(figure, "images", "power of ten", (2, 1, 2))
    images = np.arange(1, len(p_values) + 1)
    over.plot(images, log_martingale, color=COLOURS[0], linewidth=1.1, label="test martingale")
    reached = np.log10(np.maximum(statistic, 0.1))
    over.plot(images, reached, color=COLOURS[1], linewidth=1.1, label="Shiryaev-Roberts statistic")
    limit = f"alarm: at most one in {run_length:g} images without drift"
    over.axhline(np.log10(run_length), color=DARK, linewidth=0.8, linestyle="--", label=limit)
    for number, image in enumerate(alarms):
        label = "alarms" if number == 0 else None
        over.axvline(image, color=COLOURS[5], linewidth=0.8, label=label)
    over.set(xlim=(0, max(len(p_values), 1)))
    over.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=4, **LEGEND)
    return figure


_SIDES = {"own": "own products", "foreign": "other products"}


def calibration_figure(
    promised: Sequence[float],
    seen: Mapping[str, Sequence[float]],
    intervals: Mapping[str, Sequence[tuple[float, float]]],
    missed: Mapping[str, Sequence[float]],
) -> Figure:
    """Draws rates over the promised rate of false alarms, of each client's own products and of all others."""
    figure = blank_figure(7.16, 2.9)
    alarms = labelled_axes(figure, "promised false alarms", "false alarms seen", (1, 2, 1))
    misses = labelled_axes(figure, "promised false alarms", "anomalies missed", (1, 2, 2))
    kept = np.geomspace(min(promised), max(promised), 100)
    alarms.plot(kept, kept, color="0.5", linewidth=0.8, linestyle="--", label="promised")
    for place, (side, label) in enumerate(_SIDES.items()):
        if side not in seen or np.isnan(seen[side]).all():
            continue
        look: dict[str, Any] = {"color": COLOURS[place], "linewidth": 1.1, "marker": "o", "markersize": 3}
        alarms.plot(promised, seen[side], label=label, **look)
        lower, upper = np.transpose(intervals[side])
        alarms.fill_between(promised, lower, upper, color=COLOURS[place], alpha=0.15, linewidth=0)
        misses.plot(promised, missed[side], **look)
    alarms.set(xscale="log", ylim=(0, None))
    misses.set(xscale="log", ylim=(0, 1))
    figure.legend(loc="outside upper center", ncols=3, **LEGEND)
    return figure


_SCORE_BINS = 30
_COLUMNS = 4
_PANEL = 1.79  # inches: four panels are as wide as a page


@dataclass(frozen=True)
class ClientScores:
    """Scores by one client's detector.

    Attributes:
        calibration: Scores of the client's calibration images, without repetition [m].
        counts: Number of images with each of them [m].
        normal: Scores of normal test images [n].
        anomalous: Scores of anomalous test images [k].
        threshold: Score above which an image is called anomalous; infinite where nothing is.
    """

    calibration: np.ndarray
    counts: np.ndarray
    normal: np.ndarray
    anomalous: np.ndarray
    threshold: float


def client_scores_figure(clients: Mapping[int, ClientScores]) -> Figure:
    """Draws one panel a client: histograms of its scores, each as a share of its kind, and the threshold.

    Titles have the number of calibration images, and that of scores that are not finite, which are not drawn.
    """
    columns = min(len(clients), _COLUMNS)
    rows = math.ceil(len(clients) / columns)
    figure = blank_figure(max(columns, 2) * _PANEL, 0.4 + 1.6 * rows)
    first: Axes | None = None
    for place, (client, scores) in enumerate(clients.items(), start=1):
        axes = labelled_axes(figure, "", "", (rows, columns, place))
        _draw(axes, scores)
        axes.set_title(_title(client, scores), fontsize=FONT_SIZE)
        first = first or axes
    assert first is not None
    figure.supxlabel("image score", fontsize=FONT_SIZE + 1)
    figure.supylabel("share of the images", fontsize=FONT_SIZE + 1)
    handles, labels = first.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=4 if columns > 2 else 2, **LEGEND)
    return figure


def _draw(axes: Axes, scores: ClientScores) -> None:
    kinds = {
        "calibration": (scores.calibration, scores.counts, COLOURS[2]),
        "normal test": (scores.normal, np.ones(len(scores.normal)), COLOURS[0]),
        "anomalous test": (scores.anomalous, np.ones(len(scores.anomalous)), COLOURS[5]),
    }
    finite = np.concatenate([values[np.isfinite(values)] for values, *_ in kinds.values()])
    edges = np.histogram_bin_edges(finite, _SCORE_BINS).tolist()
    for name, (values, weights, colour) in kinds.items():
        shown = np.isfinite(values)
        share = weights[shown] / max(weights.sum(), 1)
        if name != "calibration":
            axes.hist(
                values[shown],
                edges,
                weights=share,
                histtype="stepfilled",
                alpha=0.4,
                color=colour,
                label=name,
            )
        label = name if name == "calibration" else None
        axes.hist(
            values[shown], edges, weights=share, histtype="step", linewidth=0.9, color=colour, label=label
        )
    # Without an end it stands in no panel, but in the legend of all.
    limit = scores.threshold if math.isfinite(scores.threshold) else math.nan
    axes.axvline(limit, color=DARK, linewidth=0.9, linestyle="--", label="threshold")


def _title(client: int, scores: ClientScores) -> str:
    limit = f"threshold {scores.threshold:.3g}" if math.isfinite(scores.threshold) else "no threshold"
    tests = np.concatenate([scores.normal, scores.anomalous])
    lost = np.count_nonzero(~np.isfinite(tests))
    return f"client {client} ({scores.counts.sum()} images): {limit}" + (
        f" ({lost} scores not finite)" if lost else ""
    )


def roc_figure(curves: Mapping[str, tuple[np.ndarray, np.ndarray]], auc: Mapping[str, float]) -> Figure:
    """Draws one line for each curve, named with its area, and guessing.

    Rates of 0, which a logarithmic axis cannot show, are left out.

    Raises:
        ValueError: `curves` is empty.
    """
    if not curves:
        raise ValueError("curves names none: there is nothing to draw")
    figure = blank_figure(3.5, 2.9)
    axes = labelled_axes(figure, "false positive rate", "true positive rate")
    axes.set(xscale="log", yscale="log")
    lowest = 1.0
    for place, (name, rates) in enumerate(curves.items()):
        false, true = (np.where(rate > 0, rate, np.nan) for rate in rates)
        lowest = min(lowest, np.nanmin(false), np.nanmin(true))
        shade = DARK if place == 0 else str(0.3 + 0.3 * place / len(curves))
        axes.step(
            false,
            true,
            where="post",
            color=shade,
            linewidth=1.8 / (1 + place),
            label=f"{name}, AUC {auc[name]:.3f}",
        )
    axes.plot([lowest, 1], [lowest, 1], color="0.5", linewidth=0.8, linestyle="--", label="guessing")
    axes.set(xlim=(lowest, 1), ylim=(lowest, 1.05))
    figure.legend(loc="outside upper center", ncols=1, **LEGEND)
    return figure


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
