"""Figure of a watch: p-values, the evidence against no drift, and the statistic that raises alarms."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure

from lit_fedad.report.style import COLOURS, DARK, LEGEND, blank_figure, labelled_axes

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

    Returns:
        The figure.
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
