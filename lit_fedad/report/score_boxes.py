"""Box plots of the scores of normal and anomalous images under several models, by client (FADngs Fig. 8)."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from numpy.typing import ArrayLike

from lit_fedad.report.figures import save_figure
from lit_fedad.report.style import DARK, FONT_SIZE, LEGEND, blank_figure

_KINDS = ("normal", "anomalous")
_FILLS = ("#A9D4EF", "#F3CE85")  # pale sky blue and pale orange of Okabe and Ito: the red lines stay visible
_RED = "#C1121F"
_MOST_COLUMNS = 5
_LOW, _HIGH = 2, 98  # percentiles that become 0 and 1


def draw_score_boxes(
    path: Path, scores: Mapping[str, Sequence[tuple[ArrayLike, ArrayLike]]], clients: Sequence[int]
) -> Figure:
    """Draws one panel a client with two boxes a model: its scores of normal and of anomalous images.

    Models have different scales of scores, and a local model differs between clients. Therefore the scores of
    one model on one client are scaled together: their 2nd percentile becomes 0, their 98th becomes 1. The
    printed gap between the medians is a share of that range, comparable over models and clients. Boxes span the
    quartiles, whiskers reach the last score within 1.5 times the height of the box; outliers and scores that
    are not finite are left out.

    Args:
        path: PNG file to write; missing folders are created.
        scores: For each model the pairs (scores of normal images, scores of anomalous images), one a client.
        clients: Number of each client.

    Raises:
        ValueError: There is no model or no client, or a model has another number of clients.
    """
    counts = {len(pairs) for pairs in scores.values()}
    if len(counts) != 1 or 0 in counts:
        raise ValueError(f"models with {sorted(counts)} clients; expected one number of clients above 0")
    count = counts.pop()
    rows = math.ceil(count / _MOST_COLUMNS)
    columns = math.ceil(count / rows)
    width = 0.35 + columns * max(1.2, 0.45 * len(scores))
    figure = blank_figure(max(3.5, width), 0.6 + 1.55 * rows)
    panels = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    spare = rows * columns - count  # left blank in the first row, so that models are named under the last
    for axes in panels[0, columns - spare :]:
        axes.set_visible(False)
    shown = [*panels[0, : columns - spare], *panels[1:].flat]
    for place, (client, axes) in enumerate(zip(clients, shown, strict=True)):
        _panel(axes, [pairs[place] for pairs in scores.values()])
        axes.set_title(f"client {client}", fontsize=FONT_SIZE, pad=3)
        axes.set_xlim(-0.5, len(scores) - 0.5)
        axes.set_xticks(range(len(scores)), list(scores), rotation=35, ha="right", rotation_mode="anchor")
    shown[0].set_yticks((0, 0.25, 0.5, 0.75, 1))
    low, high = shown[0].get_ylim()
    shown[0].set_ylim(low, high + 0.12 * (high - low))  # room for the values of the gaps
    figure.supylabel("score, scaled", fontsize=FONT_SIZE + 1)
    handles = [
        *(Patch(facecolor=fill, edgecolor=DARK, linewidth=0.5) for fill in _FILLS),
        Line2D([], [], color=_RED, linewidth=1.3),
        Line2D([], [], color=_RED, linewidth=1.1, linestyle=":"),
    ]
    labels = [*_KINDS, "median", "gap between medians"]
    figure.legend(handles, labels, loc="outside upper center", ncols=4 if width > 3.5 else 2, **LEGEND)
    save_figure(figure, path)
    return figure


def _panel(axes: Axes, pairs: Sequence[tuple[ArrayLike, ArrayLike]]) -> None:
    """Draws the boxes of one client, a pair a model, and the gap between their medians."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set(color=DARK, linewidth=0.6)
    axes.grid(axis="y", color="0.9", linewidth=0.5)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=FONT_SIZE, color=DARK, width=0.6, length=2.5)
    line = {"color": DARK, "linewidth": 0.6}
    for place, pair in enumerate(pairs):
        kinds = _scaled(pair)
        for side, fill, values in zip((-1, 1), _FILLS, kinds, strict=True):
            axes.boxplot(
                values,
                positions=[place + 0.22 * side],
                widths=0.3,
                showfliers=False,
                patch_artist=True,
                manage_ticks=False,
                boxprops={"facecolor": fill, "edgecolor": DARK, "linewidth": 0.5},
                medianprops={"color": _RED, "linewidth": 1.3},
                whiskerprops=line,
                capprops=line,
            )
        if all(values.size for values in kinds):
            low, high = (float(np.median(values)) for values in kinds)
            axes.plot([place, place], [low, high], color=_RED, linewidth=1.1, linestyle=":")
            gap, top = f"{high - low:+.2f}", axes.get_xaxis_transform()
            axes.text(
                place, 0.995, gap, transform=top, color=_RED, size=FONT_SIZE - 0.5, ha="center", va="top"
            )


def _scaled(pair: tuple[ArrayLike, ArrayLike]) -> list[np.ndarray]:
    """Scales the finite scores of both kinds to the robust range of the two together."""
    kinds = [np.asarray(values, dtype=float) for values in pair]
    kinds = [values[np.isfinite(values)] for values in kinds]
    together = np.concatenate(kinds)
    if not together.size:
        return kinds
    low, high = np.percentile(together, (_LOW, _HIGH))
    return [(values - low) / ((high - low) or 1.0) for values in kinds]
