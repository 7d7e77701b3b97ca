"""Reads the ``key=value`` options of a command into the dataclass that declares them."""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping, Sequence
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
            ``None``, ``tuple[T, ...]`` (given with commas), or ``Mapping[str, str]`` (of the name ``root``: given as
            ``root.mpdd=DIR root.wafer=DIR``).
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
    kinds = typing.get_type_hints(declared)
    typed: dict[str, Any] = {}
    overrides: dict[str, str] = {}
    for key, value in dict(map(split, options)).items():
        field, dot, name = key.partition(".")
        if _is_mapping(kinds.get(field)):
            if not name:
                raise UserError(f"{command}: give {field}.NAME=..., not {key}=...")
            typed.setdefault(field, {})[name] = value
        elif dot:
            overrides[key] = value
        else:
            typed[key] = _typed(value, kinds.get(key, str))
    return call(declared, typed, command), overrides


def separate(declared: type, options: Sequence[str]) -> tuple[list[str], list[str]]:
    """Separates the options of a command from the overrides of the configuration that it composes.

    Args:
        declared: As for `read`.
        options: Options and overrides, in any order; a key to leave out is an override (``~start``).

    Returns:
        Options that the dataclass declares, for `read`; and all others as they are, for `compose`.

    Example:
        >>> from dataclasses import dataclass
        >>> @dataclass
        ... class Attack:
        ...     steps: int = 500
        >>> separate(Attack, ["rounds=3", "steps=10", "~start"])
        (['steps=10'], ['rounds=3', '~start'])
    """
    kinds = typing.get_type_hints(declared)
    own, overrides = [], []
    for option in options:
        key = option if option.startswith("~") else split(option)[0]
        field = key.partition(".")[0]
        (own if key in kinds or _is_mapping(kinds.get(field)) else overrides).append(option)
    return own, overrides


def _is_mapping(kind: Any) -> bool:
    return typing.get_origin(kind) is Mapping


def _typed(text: str, kind: Any) -> Any:
    """Turns text into what a field holds; what does not fit stays text, for the check of types to refuse."""
    if typing.get_origin(kind) is tuple:
        return tuple(_typed(part, typing.get_args(kind)[0]) for part in text.split(",") if part)
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
