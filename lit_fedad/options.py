"""Reads the ``key=value`` options of a command into the dataclass that declares them."""

from __future__ import annotations

import types
import typing
from collections.abc import Sequence
from typing import Any, TypeVar

import yaml

from lit_fedad.config import call
from lit_fedad.errors import UserError

T = TypeVar("T")


def split(option: str) -> tuple[str, str]:
    """Splits an option at its first ``=`` into key and value.

    Raises:
        UserError: If it has none.
    """
    key, equals, value = option.partition("=")
    if not equals:
        raise UserError(f"'{option}' is not of the form key=value")
    return key, value


def read(declared: type[T], options: Sequence[str], command: str) -> tuple[T, dict[str, str]]:
    """Reads options into a dataclass; its fields are the keys, their types and defaults.

    Args:
        declared: A dataclass with fields of ``str``, ``int``, ``float``, ``bool``, ``Literal``, their union with
            ``None``, or ``tuple[str, ...]`` (given with commas).
        options: Words of the form ``key=value``; of equal keys the last one counts.
        command: Named in errors.

    Returns:
        The dataclass, and the options with a dotted key (``data.root=DIR``) that it does not declare, as text: they
        change the configuration that the command works with.

    Raises:
        UserError: For an unknown key (naming the nearest one), a value of the wrong type, or one left out.

    Example:
        >>> from dataclasses import dataclass
        >>> @dataclass
        ... class Attack:
        ...     run: str
        ...     steps: int = 500
        >>> read(Attack, ["run=outputs/a", "steps=10", "data.root=/images"], "attack")
        (Attack(run='outputs/a', steps=10), {'data.root': '/images'})
    """
    given = dict(map(split, options))
    kinds = typing.get_type_hints(declared)
    overrides = {key: value for key, value in given.items() if "." in key and key not in kinds}
    typed = {key: _typed(value, kinds.get(key, str)) for key, value in given.items() if key not in overrides}
    return call(declared, typed, command), overrides


def _typed(text: str, kind: Any) -> Any:
    """Turns text into what a field holds; what does not fit stays text, for the check of types to refuse."""
    if typing.get_origin(kind) is tuple:
        return tuple(part for part in text.split(",") if part)
    union = typing.get_origin(kind) in (typing.Union, types.UnionType)
    kinds = set(typing.get_args(kind) if union else (kind,))
    if types.NoneType in kinds and text in ("null", ""):
        return None
    if not kinds & {int, float, bool}:
        return text
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text


key_and_value = split  # replaced by `read` where a command declares its options
