"""Computes the value of a study's objective in a run."""

from collections.abc import Mapping
from typing import Any

BYTES = "bytes"
"""The objective that is no metric: bytes sent in a round, up and down."""


def objective_value(result: Mapping[str, Any], objective: str) -> float | None:
    """Computes the value of an objective in a finished run.

    Args:
        result: The content of its ``result.json``.
        objective: A metric (``pro``: mean over clients; ``pro/worst``, ``pro/pooled``) or `BYTES`.

    Returns:
        The metric after the last round; None where it is undefined.
    """
    if objective == BYTES:
        return (sum(result["bytes_up"]) + sum(result["bytes_down"])) / max(result["rounds"], 1)
    name, _, kind = objective.partition("/")
    value: float | None = result["last"][name][kind or "mean"]
    return value
