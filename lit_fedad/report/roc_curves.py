"""ROC curves of an attack by client, on logarithmic axes, which show the rates at few false positives."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from lit_fedad.report.style import DARK, LEGEND, blank_figure, labelled_axes


def roc_figure(curves: Mapping[int, tuple[np.ndarray, np.ndarray]], auc: Mapping[int, float]) -> Figure:
    """Draws one thin line a client, and the client with the largest AUC in bold with its number.

    Rates of 0, which a logarithmic axis cannot show, are left out.

    Args:
        curves: False and true positive rates of each client, ascending.
        auc: Area under the curve of each client.

    Returns:
        The figure.

    Raises:
        ValueError: `curves` names no client.
    """
    if not curves:
        raise ValueError("curves names no client: there is nothing to draw")
    worst = max(auc, key=lambda client: auc[client])
    figure = blank_figure(3.5, 2.9)
    axes = labelled_axes(figure, "false positive rate", "true positive rate")
    axes.set(xscale="log", yscale="log")
    lowest = 1.0
    others = "other clients"
    for client in sorted(curves, key=lambda client: client == worst):  # the worst on top
        false, true = (np.where(rate > 0, rate, np.nan) for rate in curves[client])
        lowest = min(lowest, np.nanmin(false), np.nanmin(true))
        bold: dict[str, Any] = {
            "color": DARK,
            "linewidth": 1.8,
            "label": f"worst: client {client}, AUC {auc[client]:.3f}",
        }
        thin: dict[str, Any] = {"color": "0.55", "linewidth": 0.7, "label": others}
        axes.step(false, true, where="post", **(bold if client == worst else thin))
        others = "_nolegend_"
    axes.plot([lowest, 1], [lowest, 1], color="0.5", linewidth=0.8, linestyle="--", label="guessing")
    axes.set(xlim=(lowest, 1), ylim=(lowest, 1.05))
    figure.legend(loc="outside upper center", ncols=3, **LEGEND)
    return figure
