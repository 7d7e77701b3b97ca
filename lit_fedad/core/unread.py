"""Finds settings that a command gives and that nothing of its run reads, such as the backbone of a trained encoder."""

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from lit_fedad.core.building import locate, takes
from lit_fedad.core.config import Config, unresolved
from lit_fedad.core.nested import value_at
from lit_fedad.core.options import key_of

_BY_REFERENCE = frozenset(
    ("backbone", "condensation", "distillation", "encoder", "features", "grid", "public", "warmup")
)
"""Sections and keys that a run reads only where another section refers to them (``${grid}``), or takes them."""

_OF_ANOMALIES = (
    "calibration", "evaluation.alone", "evaluation.alpha", "evaluation.pro_limit", "evaluation.spro_limit",
)  # fmt: skip
_OF_CLASSES = ("evaluation.client_test",)
"""Sections and keys that runs of one kind of task read alone."""


def unread(overrides: Sequence[str]) -> list[str]:
    """Returns those of a command's overrides that its run does not read.

    Args:
        overrides: Of a configuration that can be composed.

    Returns:
        Overrides of sections that no part of the run refers to and none takes as an argument, and of those that belong
        to the other kind of task, in their order.
    """
    asked = [given for given in overrides if _names(given, (*_BY_REFERENCE, *_OF_ANOMALIES, *_OF_CLASSES))]
    asked = [given for given in asked if not given.startswith("~") and not given.endswith("=null")]
    if not asked:
        return []
    config = unresolved(overrides)
    classifies = getattr(locate(config["task"]["_target_"]), "kind", None) == "classification"
    read = _referred(config) | _taken(config) | {*(_OF_CLASSES if classifies else _OF_ANOMALIES)}
    return [given for given in asked if not _names(given, read)]


def _names(override: str, sections: Iterable[str]) -> bool:
    return any(_one_holds_the_other(key_of(override), section) for section in sections)


def _one_holds_the_other(key: str, reference: str) -> bool:
    return f"{key}.".startswith(f"{reference}.") or f"{reference}.".startswith(f"{key}.")


def _taken(config: Config) -> set[str]:
    """Returns the sections that are built for the task or the server, which takes them as arguments."""
    takers = {"backbone": config["task"], "public": config["method"]["server"]}
    return {name for name, taker in takers.items() if takes(taker, name)}


def _referred(config: Config) -> set[str]:
    """Returns the dotted keys that sections refer to, and those that these refer to in turn."""
    found: set[str] = set()
    waiting: list[Any] = [section for name, section in config.items() if name not in _BY_REFERENCE]
    while waiting:
        for reference in set(_references(waiting.pop())) - found:
            found.add(reference)
            waiting.append(value_at(config, reference))
    return found


def _references(value: Any) -> Iterator[str]:
    """Yields the dotted keys within ``${}`` of a nested value."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for part in value:
            yield from _references(part)
    elif isinstance(value, str) and "${" in value:
        yield from re.findall(r"[a-z]\w*(?:\.\w+)*", value)
