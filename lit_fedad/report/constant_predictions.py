"""Warning about classifiers that predict one class for every image: their accuracy is that class's share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_MOST_NUMBERS = 10


def constant_predictions(metrics: Mapping[str, Any]) -> str | None:
    """Names the clients that predict a single class for every test image.

    Args:
        metrics: Metrics of one evaluation by name, with ``predicted_classes`` if classes are predicted.

    Returns:
        One line; None if no client does.

    Example:
        >>> constant_predictions({"predicted_classes": {"per_client": {0: 1.0, 1: 4.0}}})
        "client 0 predicts a single class for every test image; its accuracy is that class's share"
        >>> constant_predictions({"predicted_classes": {"per_client": {0: 2.0, 1: 4.0}}})
    """
    found: Mapping[Any, float] = metrics.get("predicted_classes", {}).get("per_client", {})
    clients = [str(client) for client, classes in found.items() if classes == 1]
    if not clients:
        return None
    named = ", ".join(clients[:_MOST_NUMBERS]) + (", ..." if len(clients) > _MOST_NUMBERS else "")
    if len(clients) == 1:
        who = f"client {named} predicts"
    elif len(clients) == len(found):
        who = f"all {len(clients)} clients predict"
    else:
        who = f"{len(clients)} of {len(found)} clients ({named}) predict"
    whose = "its" if len(clients) == 1 else "their"
    return f"{who} a single class for every test image; {whose} accuracy is that class's share"
