"""Nested configurations by dotted key."""

from collections.abc import Mapping
from typing import Any


def flatten(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values of a nested configuration by dotted key; an empty section is a value.

    Example:
        >>> flatten({"rounds": 3, "task": {"loss": {"margin": 0.5}}, "public": {}})
        {'rounds': 3, 'task.loss.margin': 0.5, 'public': {}}
    """
    values: dict[str, Any] = {}
    for key, value in config.items():
        inner = flatten(value) if isinstance(value, Mapping) else {}
        values |= {f"{key}.{name}": leaf for name, leaf in inner.items()} or {str(key): value}
    return values
