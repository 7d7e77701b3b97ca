"""Figures of decisions: drift of a stream, promised and seen rates, each client's scores beside its threshold."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lit_fedad.metrics.drift import Step
from lit_fedad.report.style import COLOURS, DARK, FONT_SIZE, LEGEND, blank_figure, labelled_axes

_BINS = 20


def drift_figure(steps: Sequence[Step], run_length: float) -> Figure:
    """Draws the p-values of a stream as a histogram, and martingale and Shiryaev-Roberts statistic over its images.

    Args:
        steps: What the test of drift says after each image.
        run_length: Shiryaev-Roberts statistic at which an alarm is raised.
    """
    figure = blank_figure(7.16, 4.6)
    histogram = labelled_axes(figure, "p-value in the stream", "images", (2, 1, 1))
    p_values = [step.p_value for step in steps]
    histogram.hist(p_values, np.linspace(0, 1, _BINS + 1).tolist(), color=COLOURS[0], linewidth=0)
    expected = len(steps) / _BINS
    histogram.axhline(expected, color=DARK, linewidth=0.8, linestyle="--", label="expected without drift")
    histogram.set(xlim=(0, 1))
    histogram.legend(loc="upper right", **LEGEND)
    course = labelled_axes(figure, "images", "power of ten", (2, 1, 2))
    images = range(1, len(steps) + 1)
    log_martingale = [step.log_martingale for step in steps]
    course.plot(images, log_martingale, color=COLOURS[0], linewidth=1.1, label="test martingale")
    log_statistic = np.log10(np.maximum([step.statistic for step in steps], 0.1))
    course.plot(images, log_statistic, color=COLOURS[1], linewidth=1.1, label="Shiryaev-Roberts statistic")
    limit = f"alarm: at most one in {run_length:g} images without drift"
    course.axhline(np.log10(run_length), color=DARK, linewidth=0.8, linestyle="--", label=limit)
    alarms = (image for image, step in zip(images, steps, strict=True) if step.alarm)
    for number, image in enumerate(alarms):
        label = "alarms" if number == 0 else None
        course.axvline(image, color=COLOURS[5], linewidth=0.8, label=label)
    course.set(xlim=(0, max(len(steps), 1)))
    course.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=4, **LEGEND)
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
    rates = np.geomspace(min(promised), max(promised), 100)
    alarms.plot(rates, rates, color="0.5", linewidth=0.8, linestyle="--", label="promised")
    for number, (side, label) in enumerate(_SIDES.items()):
        if side not in seen or np.isnan(seen[side]).all():
            continue
        style: dict[str, Any] = {"color": COLOURS[number], "linewidth": 1.1, "marker": "o", "markersize": 3}
        alarms.plot(promised, seen[side], label=label, **style)
        lower, upper = np.transpose(intervals[side])
        alarms.fill_between(promised, lower, upper, color=COLOURS[number], alpha=0.15, linewidth=0)
        misses.plot(promised, missed[side], **style)
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
    """Draws one panel for each client: histograms of its scores, each as a share of its kind, and the threshold.

    Titles have the number of calibration images, and that of scores that are not finite, which are not drawn.
    """
    columns = min(len(clients), _COLUMNS)
    rows = math.ceil(len(clients) / columns)
    figure = blank_figure(max(columns, 2) * _PANEL, 0.4 + 1.75 * rows)
    for number, (client, scores) in enumerate(clients.items(), start=1):
        axes = labelled_axes(figure, "", "", (rows, columns, number))
        _draw_histograms(axes, scores)
        axes.set_title(_title(client, scores), fontsize=FONT_SIZE)
    figure.supxlabel("image score", fontsize=FONT_SIZE + 1)
    figure.supylabel("share of the images", fontsize=FONT_SIZE + 1)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=4 if columns > 2 else 2, **LEGEND)
    return figure


def _draw_histograms(axes: Axes, scores: ClientScores) -> None:
    kinds = {
        "calibration": (scores.calibration, scores.counts, COLOURS[2]),
        "normal test": (scores.normal, np.ones(len(scores.normal)), COLOURS[0]),
        "anomalous test": (scores.anomalous, np.ones(len(scores.anomalous)), COLOURS[5]),
    }
    finite = np.concatenate([values[np.isfinite(values)] for values, *_ in kinds.values()])
    # In double precision: single precision has no room for the edges between scores that are nearly equal.
    edges = np.histogram_bin_edges(finite.astype(float), _SCORE_BINS).tolist()
    for name, (values, weights, colour) in kinds.items():
        is_finite = np.isfinite(values)
        share = weights[is_finite] / max(weights.sum(), 1)
        bars = partial(axes.hist, values[is_finite], edges, weights=share, color=colour)
        if name != "calibration":
            bars(histtype="stepfilled", alpha=0.4, label=name)
        bars(histtype="step", linewidth=0.9, label=name if name == "calibration" else None)
    # An infinite threshold is drawn in no panel, but stands in the common legend.
    limit = scores.threshold if math.isfinite(scores.threshold) else math.nan
    axes.axvline(limit, color=DARK, linewidth=0.9, linestyle="--", label="threshold")


def _title(client: int, scores: ClientScores) -> str:
    limit = f"threshold {scores.threshold:.3g}" if math.isfinite(scores.threshold) else "no threshold"
    tests = np.concatenate([scores.normal, scores.anomalous])
    not_finite = np.count_nonzero(~np.isfinite(tests))
    # On lines of their own, because a panel is only as wide as one of these texts.
    return f"client {client} ({scores.counts.sum()} images)\n{limit}" + (
        f"\n({not_finite} scores not finite)" if not_finite else ""
    )
