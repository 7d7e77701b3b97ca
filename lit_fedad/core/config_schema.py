"""Checks keys, types and ranges of the configuration that no target's signature describes."""

import functools
import math
import re
import typing
from collections.abc import Mapping
from typing import Any

import yaml

from lit_fedad.core.bounds import RANGES, check_alpha, pair
from lit_fedad.core.building import check_keys, check_type
from lit_fedad.core.config_groups import conf_folder, config_groups
from lit_fedad.core.errors import UserError
from lit_fedad.core.nested import flatten, value_at
from lit_fedad.core.text import printable

TYPES: dict[str, Any] = {
    "image.size": int | list,
    "image.resize": int | None,
    "image.tile": int | None,
    "image.overlap": int | None,
    "image.page": int | None,
    "evaluation.alpha": float | list | str,
    "evaluation.client_test": typing.Literal["own", "balanced"],
    "calibration.share": float | None,
    "calibration.by": typing.Literal["product", "client"],
    "learning_rate_decay": typing.Literal["cosine", None],
}
"""Types of keys whose default value does not show their type."""

_NEEDED: dict[str, Any] = {
    **dict.fromkeys(("data", "partition", "task"), Mapping),
    **dict.fromkeys(("method.client", "method.server", "federation.sampler", "federation.channel"), Mapping),
    **dict.fromkeys(("method.name", "method.paper"), str),
    "federation.pool_bytes": int,
    "tracking.enabled": bool,
}
"""Types of keys that every run has in addition to those of ``config.yaml``; a mapping must have a ``_target_``."""

_TOO_LARGE = 1 << 63
"""Magnitude from which whole numbers do not fit into a run's files."""


def check_root(config: Mapping[str, Any]) -> None:
    """Checks the keys that no target's signature describes against the keys and types of ``config.yaml``.

    Raises:
        UserError: Naming the first key that is not valid, or whose value has another type or is out of range.
    """
    root, groups = _root_defaults(), set(config_groups())
    check_keys(config, groups | set(root), "configuration")
    for name in sorted(groups & config.keys()):
        if not isinstance(config[name], Mapping | None):
            raise UserError(f"{name}={config[name]!r} must be a section")
    for name, default in root.items():
        if name in ("fabric", "callbacks") or name not in config:
            continue
        section, defaults, prefix = config[name], default, f"{name}."
        if not isinstance(default, dict):
            section, defaults, prefix = {name: section}, {name: default}, ""
        if not isinstance(section, Mapping):
            raise UserError(f"{name}={section!r} must be a section")
        if name != "image":  # other keys of the image are arguments of its transform
            check_keys(section, set(defaults), name)
        for key in defaults.keys() & section.keys():
            # Keys that are null by default take paths.
            annotation = str | None if defaults[key] is None else type(defaults[key])
            check_type(section[key], TYPES.get(prefix + key, annotation), prefix + key)
    _check_callbacks(config.get("callbacks", {}))
    check_alpha(config.get("evaluation", {}).get("alpha", "auto"))
    for key, (least, most) in RANGES.items():
        value = value_at(config, key)
        numbers = pair(key, value) if isinstance(value, list) else () if value is None else (value,)
        if not all(isinstance(number, int | float) and least <= number <= most for number in numbers):
            bound = f"at least {least}" if most == math.inf else f"in [{least}, {most}]"
            raise UserError(f"{key}={value} must be {bound}")


def _check_callbacks(callbacks: Any) -> None:
    if not isinstance(callbacks, Mapping):
        raise UserError(f"callbacks={callbacks!r} must be a section")
    for name, section in callbacks.items():
        if not isinstance(section, Mapping) or "_target_" not in section:
            raise UserError(f"callbacks.{name}={section!r} must be a section with _target_")


def check_complete(config: Mapping[str, Any]) -> None:
    """Checks that a composed configuration has the keys that every run needs, and values that its files can hold.

    Raises:
        UserError: Naming a key that was removed (``~key``), or whose value is of another type, too large or not UTF-8.
    """
    for key in (*flatten(_root_defaults()), *_NEEDED):
        section, _, leaf = key.rpartition(".")
        holder = config.get(section, {}) if section else config
        if leaf not in holder:
            raise UserError(f"{key} is missing, and every run has one; give it a value")
        if (kind := _NEEDED.get(key)) is not Mapping:
            check_type(holder[leaf], kind or Any, key)
        elif not isinstance(holder[leaf], Mapping) or not isinstance(holder[leaf].get("_target_"), str):
            raise UserError(f"{key} must be a section with _target_")
    for key, value in flatten(config).items():
        for part in value if isinstance(value, list) else (value,):
            if isinstance(part, int) and abs(part) >= _TOO_LARGE:
                raise UserError(f"{key}={part!s:.40} is too large a number")
            if isinstance(part, str) and re.search("[\ud800-\udfff]", part):
                raise UserError(
                    f"{key}={printable(part)}: is not UTF-8, which files of a run hold alone; rename it"
                )


def _root_defaults() -> dict[str, Any]:
    """Returns the keys of ``config.yaml`` with their default values."""
    return _parsed((conf_folder() / "config.yaml").read_text())


@functools.cache
def _parsed(text: str) -> dict[str, Any]:
    return {key: value for key, value in yaml.safe_load(text).items() if key != "defaults"}
