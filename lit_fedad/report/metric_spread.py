"""What tables show of a metric beside its mean over clients: worst client, pooled test set, mean over products."""

import math
from collections.abc import Mapping
from typing import Any


def spread_columns(metrics: Mapping[str, Any]) -> dict[str, str]:
    """Returns the values of a metric beside its mean over clients: key by heading."""
    spreads = {"worst\nclient": "worst", "pooled": "pooled"}
    if any("product_mean" in values for values in metrics.values() if isinstance(values, Mapping)):
        spreads["mean of\nproducts"] = "product_mean"
    return spreads


def said_of(spreads: Mapping[str, str]) -> str:
    """Explains the columns of `spread_columns` in words."""
    products = ", mean over products" if "product_mean" in spreads.values() else ""
    return f"worst client, pooled test set{products}"


def without_value(metrics: Mapping[str, Any]) -> str | None:
    """Names the products that have no part in the mean over products; None if all have."""
    name = next(
        (name for name, values in metrics.items() if name != "round" and "per_product" in values), None
    )
    if name is None:
        return None
    values = metrics[name]["per_product"]
    lacking = [product for product, value in values.items() if value is None or math.isnan(value)]
    if not lacking:
        return None
    return f"Without a normal or an anomalous test image, and in no mean over products: {', '.join(lacking)}."
