"""Computes the value of a study's objective in a run."""

from collections.abc import Mapping
from typing import Any

from lit_fedad.errors import UserError

BYTES = "bytes"
"""The objective that is no metric: bytes sent in a round, up and down."""


def objective_value(result: Mapping[str, Any], objective: str) -> float | None:
    """Computes the value of an objective in a finished run.

    Args:
        result: The content of its ``result.json``.
        objective: A metric (``pro``: mean over clients; ``pro/worst``, ``pro/pooled``, ``pro/product_mean``), or
            `BYTES`.

    Returns:
        The metric after the last round; None where it is undefined.

    Raises:
        UserError: As `metric_value`.
    """
    if objective == BYTES:
        return (sum(result["bytes_up"]) + sum(result["bytes_down"])) / max(result["rounds"], 1)
    return metric_value(result["last"], objective)


def metric_value(metrics: Mapping[str, Any], objective: str) -> float | None:
    """Returns the value of an objective that is a metric, from the summaries of a round by name.

    Raises:
        UserError: If the metric is not measured, or not by product.
    """
    name, _, kind = objective.partition("/")
    if name not in metrics:
        raise UserError(
            f"objective '{objective}' is not measured here; one of {', '.join([*metrics, BYTES])}"
        )
    value: float | None
    try:
        value = metrics[name][kind or "mean"]
    except KeyError:
        raise UserError(f"objective '{objective}': this run knows no products; give {name}") from None
    return value
