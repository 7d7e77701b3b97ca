"""Metrics of a federation: the value of every client, their mean, the worst, and that of all clients pooled.

The mean of the clients' AUROCs and the AUROC of their pooled scores answer different questions and part
widely when clients score on different scales, so both are reported under names of their own.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import NotRequired, TypedDict

from lit_fedad.core.errors import UserError
from lit_fedad.metrics.base import MergeableMetric, union


class Summary(TypedDict):
    """One metric over a federation, and over products where they are known (`with_products`); NaN where undefined."""

    mean: float
    worst: float
    pooled: float
    per_client: dict[int, float]
    per_product: NotRequired[dict[str, float]]
    product_mean: NotRequired[float]


def summarise(per_client: Mapping[int, MergeableMetric]) -> dict[str, Summary]:
    """Summarises the metrics of all clients.

    Nothing is gathered from other processes: bring the clients' metrics together first.

    Args:
        per_client: Metrics of every client by client id, of equal settings; left unchanged. The worst
            of the values that they name as `lower_is_better` is the maximum. Clients of one model may share one
            object, whose samples are pooled once: AUPIMO needs so many pixels, not so many clients.

    Returns:
        For every name that `compute_local` returns, plain floats: the mean and the worst (the minimum) over
        the clients for which the value is defined (NaN if there is none), the value of all clients' samples
        pooled, and the value of every client in ascending order of id.

    Raises:
        UserError: If there is no client.
        ValueError: If the settings of the clients' metrics differ.

    """
    if not per_client:
        raise UserError("no client was evaluated: give at least one client test images")
    pooled = union({id(metrics): metrics for metrics in per_client.values()}.values())
    values = {client: plain_values(metrics) for client, metrics in sorted(per_client.items())}
    return {
        name: summary(
            {client: of_client[name] for client, of_client in values.items()},
            value,
            max if name in pooled.lower_is_better else min,
        )
        for name, value in plain_values(pooled).items()
    }


def summary(per_client: dict[int, float], pooled: float, worst: Callable[[list[float]], float]) -> Summary:
    """Computes the mean and the worst of the defined values, and joins the pooled value to them."""
    defined = [value for value in per_client.values() if not math.isnan(value)]
    return {
        "mean": defined_mean(defined),
        "worst": worst(defined) if defined else math.nan,
        "pooled": pooled,
        "per_client": per_client,
    }


def plain_values(metrics: MergeableMetric) -> dict[str, float]:
    """Computes the values of a metric's own samples as plain floats, by name."""
    return {name: float(value) for name, value in metrics.compute_local().items()}


def defined_mean(values: Iterable[float]) -> float:
    """Computes the mean of the values that are not NaN; NaN if there is none."""
    defined = [value for value in values if not math.isnan(value)]
    return math.fsum(defined) / len(defined) if defined else math.nan


def over_clients(values: Mapping[int, Mapping[str, Mapping[str, float]]]) -> dict[str, dict[str, float]]:
    """Averages the clients' values of single products.

    Args:
        values: Of every client the values by product and name; a client may lack a product.

    Returns:
        By name and product the mean over the clients for which the value is defined; NaN if there is none.

    Example:
        >>> over_clients({0: {"nut": {"pro": 0.5}}, 1: {"nut": {"pro": 0.75}, "bolt": {"pro": math.nan}}})
        {'pro': {'nut': 0.625, 'bolt': nan}}
    """
    by_name: dict[str, dict[str, list[float]]] = {}
    for of_client in values.values():
        for product, of_product in of_client.items():
            for name, value in of_product.items():
                by_name.setdefault(name, {}).setdefault(product, []).append(value)
    return {
        name: {product: defined_mean(of_product) for product, of_product in by_product.items()}
        for name, by_product in by_name.items()
    }


def with_products(
    summaries: Mapping[str, Summary], per_product: Mapping[str, Mapping[str, float]]
) -> dict[str, Summary]:
    """Adds values of single products to summaries, and their mean over products, as tables of MVTec AD have it.

    Args:
        summaries: Summaries by name.
        per_product: Values by name and product, of all or some of the names. A product for which a value is NaN, such
            as the AUROC of one without an anomalous image, has no part in the mean.

    Returns:
        The summaries by name; a name that ``per_product`` lacks is left as it is.

    Example:
        >>> value = summary({0: 0.6}, 0.6, min)
        >>> with_products({"pro": value}, {"pro": {"nut": 0.5, "bolt": math.nan, "cap": 0.75}})["pro"]["product_mean"]
        0.625
    """
    added: dict[str, Summary] = {}
    for name, value in summaries.items():
        added[name] = value
        if name in per_product:
            by_product = dict(per_product[name])
            added[name] = {
                **value,
                "per_product": by_product,
                "product_mean": defined_mean(by_product.values()),
            }
    return added
