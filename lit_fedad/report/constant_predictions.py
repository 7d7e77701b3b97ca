"""Remarks on predictions that look at no image: what they reach, and whether a client makes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lit_fedad.core.client_names import NUMBERS, ClientNames
from lit_fedad.report.naming import metric_title

_MOST_NUMBERS = 10

CONSTANT_LABELS = {
    "client_largest": "always the client's largest class",
    "global_largest": "always the largest class of all clients",
    "random": "a class of the client's at random",
}
"""Label of each constant prediction (`CONSTANTS`), by its name in results."""


def looking_at_nothing(result: Mapping[str, Any]) -> str | None:
    """Says what accuracy predictions that look at no image have after the last round.

    Returns:
        One line; None for a result without such accuracies.
    """
    if not result.get("constants"):
        return None
    found = {name: values[str(result["last"]["round"])] for name, values in result["constants"].items()}
    named = next(iter(found.values()))
    metric = "own_accuracy" if "own_accuracy" in named else next(iter(named))
    parts = [f"{CONSTANT_LABELS[name]} {values[metric]:.3f}" for name, values in found.items()]
    return f"Without a look at images, {metric_title(metric)}: {', '.join(parts)}."


def constant_predictions(metrics: Mapping[str, Any], names: ClientNames = NUMBERS) -> str | None:
    """Names the clients that predict a single class for every test image.

    Returns:
        One line; None if no client does.

    Example:
        >>> constant_predictions({"predicted_classes": {"per_client": {0: 1.0, 1: 4.0}}})
        "client 0 predicts a single class for every test image; its accuracy is that class's share"
        >>> constant_predictions({"predicted_classes": {"per_client": {0: 2.0, 1: 4.0}}})
    """
    found: Mapping[Any, float] = metrics.get("predicted_classes", {}).get("per_client", {})
    clients = [int(client) for client, classes in found.items() if classes == 1]
    if not clients:
        return None
    named = ", ".join(map(names.label, clients[:_MOST_NUMBERS])) + (
        ", ..." if len(clients) > _MOST_NUMBERS else ""
    )
    if len(clients) == 1:
        who = f"{names.title(clients[0])} predicts"
    elif len(clients) == len(found):
        who = f"all {len(clients)} clients predict"
    else:
        who = f"{len(clients)} of {len(found)} clients ({named}) predict"
    whose = "its" if len(clients) == 1 else "their"
    return f"{who} a single class for every test image; {whose} accuracy is that class's share"
