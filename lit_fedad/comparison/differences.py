"""Differences between configurations, as overrides."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from lit_fedad.config import Config, flatten

# Where and when a run happened, which of several seeds it is, and keys that repeat another one.
_NOT_COMPARED = (
    *("seed", "out", "tracking", "fresh", "cache", "data.root"),
    *("fabric.accelerator", "fabric.devices", "fabric.num_nodes"),
    *("task.grid", "task.image_size"),
)
_PLAIN = re.compile(r"[\w./:+-]*")


def differences(config: Config, other: Config) -> dict[str, str]:
    """Finds the overrides that make a configuration of another one.

    Seed, circumstances and folders are not compared; of the backbone's weights only whether they are random.

    Args:
        config: A configuration.
        other: The configuration that it is compared with.

    Returns:
        Overrides by dotted key, in alphabetical order.

    Example:
        >>> differences({"seed": 1, "image": {"size": 32}}, {"seed": 0, "image": {"size": 64}, "grid": 4})
        {'grid': '~grid', 'image.size': 'image.size=32'}
        >>> differences({"head": None}, {"head": {"hidden": 4}})
        {'head': 'head=null'}
    """
    ours, theirs = _comparable(config), _comparable(other)
    new = ours.keys() - theirs.keys()
    # A value in place of a section overrides the section, all of whose keys go with it.
    sections = {key for key in new if any(their.startswith(f"{key}.") for their in theirs)}
    gone = {key for key in theirs.keys() - ours.keys() if not any(key.startswith(f"{s}.") for s in sections)}
    overrides = {key: f"~{key}" for key in gone}
    overrides |= {key: f"{'' if key in sections else '+'}{key}={_text(ours[key])}" for key in new}
    overrides |= {
        key: f"{key}={_text(ours[key])}" for key in ours.keys() & theirs.keys() if ours[key] != theirs[key]
    }
    return dict(sorted(overrides.items()))


def shortened(items: Sequence[str], most: int = 3) -> str:
    """Joins texts with commas, and counts those beyond the first ones.

    Args:
        items: Texts.
        most: Number of texts to name.

    Example:
        >>> shortened(["rounds=3", "grid=4", "batch_size=2"], most=2)
        'rounds=3, grid=4 and 1 more'
    """
    rest = f" and {len(items) - most} more" if len(items) > most else ""
    return ", ".join(items[:most]) + rest


def _text(value: Any) -> str:
    """Writes a value as an override does."""
    if not isinstance(value, str):
        return json.dumps(value, separators=(",", ":"))
    return value if _PLAIN.fullmatch(value) else "'" + value.replace("'", "\\'") + "'"


def _comparable(config: Config) -> dict[str, Any]:
    values = {
        key: value
        for key, value in flatten(config).items()
        if key not in _NOT_COMPARED and key.partition(".")[0] not in _NOT_COMPARED
    }
    if values.get("backbone.weights") not in (None, "random"):
        values["backbone.weights"] = None
    return values
