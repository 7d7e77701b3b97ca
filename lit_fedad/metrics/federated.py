"""Metrics of a federation: the value of every client, their mean, the worst, and that of all clients pooled.

The mean of the clients' AUROCs and the AUROC of their pooled scores answer different questions and part
widely when clients score on different scales, so both are reported under names of their own.
"""

import math
from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any, Protocol, TypedDict

from torch import Tensor

from lit_fedad.errors import UserError


class ClientMetrics(Protocol):
    """Metric that can be summarised over clients, such as `AnomalyMetrics`."""

    lower_is_better: frozenset[str]

    def reset(self) -> None:
        """Removes all samples."""

    def merge_state(self, incoming_state: Any) -> None:
        """Adds another client's state to this one."""

    def compute_local(self) -> dict[str, Tensor]:
        """Computes values by name from the samples of this process alone."""


class Summary(TypedDict):
    """One metric over a federation; NaN where undefined."""

    mean: float
    worst: float
    pooled: float
    per_client: dict[int, float]


def summarise(per_client: Mapping[int, ClientMetrics]) -> dict[str, Summary]:
    """Summarises the metrics of all clients.

    Nothing is gathered from other processes: bring the clients' metrics together first.

    Args:
        per_client: Metrics of every client by client id, of equal settings; left unchanged. The worst
            of the values that they name as `lower_is_better` is the maximum.

    Returns:
        For every name that `compute_local` returns, plain floats: the mean and the worst (the minimum) over
        the clients for which the value is defined (NaN if there is none), the value of all clients' samples
        pooled, and the value of every client in ascending order of id.

    Raises:
        UserError: If there is no client.
        ValueError: If the settings of the clients' metrics differ.

    Example:
        >>> import torch
        >>> from lit_fedad.metrics.anomaly import AnomalyMetrics
        >>> north, south = AnomalyMetrics(pixel=False), AnomalyMetrics(pixel=False)
        >>> north.update(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0, 1, 1]))
        >>> south.update(torch.tensor([10.0, 20.0, 15.0]), torch.tensor([0, 0, 1]))
        >>> summarise({1: south, 0: north})["i_auroc"]
        {'mean': 0.75, 'worst': 0.5, 'pooled': 0.4444444444444444, 'per_client': {0: 1.0, 1: 0.5}}
    """
    if not per_client:
        raise UserError("no client was evaluated: give at least one client test images")
    pooled = deepcopy(next(iter(per_client.values())))
    pooled.reset()
    values: dict[int, dict[str, float]] = {}
    for client, metrics in sorted(per_client.items()):
        pooled.merge_state(metrics)
        values[client] = {name: float(value) for name, value in metrics.compute_local().items()}
    return {
        name: summary(
            {client: of_client[name] for client, of_client in values.items()},
            float(value),
            max if name in pooled.lower_is_better else min,
        )
        for name, value in pooled.compute_local().items()
    }


def summary(per_client: dict[int, float], pooled: float, worst: Callable[[list[float]], float]) -> Summary:
    """Computes the mean and the worst of the defined values, and joins the pooled value to them."""
    defined = [value for value in per_client.values() if not math.isnan(value)]
    return {
        "mean": math.fsum(defined) / len(defined) if defined else math.nan,
        "worst": worst(defined) if defined else math.nan,
        "pooled": pooled,
        "per_client": per_client,
    }
