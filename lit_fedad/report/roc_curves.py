"""ROC curves of an attack, on logarithmic axes, which show the rates at few false positives."""

from collections.abc import Mapping

import numpy as np
from matplotlib.figure import Figure

from lit_fedad.report.style import DARK, LEGEND, blank_figure, labelled_axes


def roc_figure(curves: Mapping[str, tuple[np.ndarray, np.ndarray]], auc: Mapping[str, float]) -> Figure:
    """Draws one line for each curve, named with its area, and guessing.

    Rates of 0, which a logarithmic axis cannot show, are left out.

    Args:
        curves: False and true positive rates, ascending, by name.
        auc: Area under each curve.

    Returns:
        The figure.

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
