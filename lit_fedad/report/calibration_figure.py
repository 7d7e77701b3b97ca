"""Figure of the false alarms that were promised, those that were seen, and the misses that they cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from lit_fedad.report.style import COLOURS, LEGEND, blank_figure, labelled_axes

_SIDES = {"own": "own products", "foreign": "other products"}


def calibration_figure(
    promised: Sequence[float],
    seen: Mapping[str, Sequence[float]],
    intervals: Mapping[str, Sequence[tuple[float, float]]],
    missed: Mapping[str, Sequence[float]],
) -> Figure:
    """Draws rates over the promised rate of false alarms, of each client's own products and of all others.

    Args:
        promised: Promised rates of false alarms, ascending.
        seen: Rates of false alarms of all clients together, by side (``own``, ``foreign``); NaN is left out.
        intervals: Their 95 % intervals.
        missed: Rates of misses.

    Returns:
        The figure.
    """
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
