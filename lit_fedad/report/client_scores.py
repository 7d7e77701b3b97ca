"""Figure of each client's scores beside the threshold by which it decides."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lit_fedad.report.style import COLOURS, DARK, FONT_SIZE, LEGEND, blank_figure, labelled_axes

_BINS = 30
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

    Args:
        clients: Scores by client, at least one.

    Returns:
        The figure.
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
    edges = np.histogram_bin_edges(finite, _BINS).tolist()
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
