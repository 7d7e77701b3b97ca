"""Access to nested configurations by dotted keys, and their hash."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any


def flatten(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values of a nested configuration by dotted key; an empty section counts as a value.

    Example:
        >>> flatten({"rounds": 3, "task": {"loss": {"margin": 0.5}}, "public": {}})
        {'rounds': 3, 'task.loss.margin': 0.5, 'public': {}}
    """
    values: dict[str, Any] = {}
    for key, value in config.items():
        inner = flatten(value) if isinstance(value, Mapping) else {}
        values |= {f"{key}.{name}": leaf for name, leaf in inner.items()} or {str(key): value}
    return values


def value_at(config: Any, key: str) -> Any:
    """Returns the value of a dotted key in a nested configuration; None if the key does not exist.

    Example:
        >>> value_at({"task": {"loss": {"margin": 0.5}}}, "task.loss.margin"), value_at({"task": None}, "task.loss")
        (0.5, None)
    """
    for name in key.split("."):
        config = config.get(name) if isinstance(config, Mapping) else None
    return config


def hash_of(values: Any, digits: int = 16) -> str:
    """Computes a hash of nested values, which does not depend on the order of keys."""
    text = json.dumps(values, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:digits]
