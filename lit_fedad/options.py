"""Reads the ``key=value`` options of a command into the dataclass that declares them."""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal, TypeVar

from lit_fedad.config import call
from lit_fedad.errors import UserError

T = TypeVar("T")

_TRUTH = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
_PARSERS: dict[Any, Callable[[str], Any]] = {
    int: int,
    float: float,
    bool: lambda text: _TRUTH[text.lower()],
}


def split(option: str) -> tuple[str, str]:
    """Splits an option at its first ``=`` into key and value.

    Raises:
        UserError: If it has none.
    """
    key, equals, value = option.partition("=")
    if not equals:
        raise UserError(f"'{option}' is not of the form key=value")
    return key, value


def join(overrides: Mapping[str, str]) -> list[str]:
    """Writes overrides as `lit_fedad.config.compose` takes them.

    Example:
        >>> join({"rounds": "3", "~cache": ""})
        ['rounds=3', '~cache']
    """
    return [key if key.startswith("~") else f"{key}={value}" for key, value in overrides.items()]


def read(
    declared: type[T],
    options: Sequence[str],
    command: str,
    overrides: Literal["none", "dotted", "all"] = "dotted",
) -> tuple[T, dict[str, str]]:
    """Reads options into a dataclass; its fields are the keys, their types and defaults.

    Args:
        declared: A dataclass with fields of ``str``, ``int``, ``float``, ``bool``, ``Literal``, their union with
            ``None``, or ``tuple[str, ...]`` and ``tuple[int, ...]`` (given with commas).
        options: Words of the form ``key=value``; of equal keys the last one counts. A declared key without a value
            (``out=``) counts as not given.
        command: Named in errors.
        overrides: Which keys that are not declared are overrides, which change the configuration that the command
            works with: none, those with a dot (``data.root=DIR``), or all, with those that Hydra takes out
            (``~cache``) among them. Of all, a key close to a declared one is refused as misspelt.

    Returns:
        The dataclass, and the overrides: value by key, in the order given.

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
    own: dict[str, Any] = {}
    others: dict[str, str] = {}
    for option in options:
        if overrides == "all" and option.startswith("~"):
            others[option] = ""
            continue
        key, value = split(option)
        if key in kinds or overrides == "none" or (overrides == "dotted" and "." not in key):
            own[key] = value  # an unknown one is refused below
        elif overrides == "all" and (near := difflib.get_close_matches(key, kinds, n=1, cutoff=0.8)):
            raise UserError(f"{command} has no key '{key}'; did you mean '{near[0]}'?")
        else:
            others[key] = value
    typed = {
        key: _typed(text, kinds.get(key, str), f"{command}.{key}")
        for key, text in own.items()
        if text or key not in kinds
    }
    return call(declared, typed, command), others


def _typed(text: str, kind: Any, where: str) -> Any:
    """Turns text into what a field holds; what does not fit stays text, for the check of types to refuse."""
    if typing.get_origin(kind) is tuple:
        element = typing.get_args(kind)[0]
        parts = tuple(_typed(part.strip(), element, where) for part in text.split(",") if part.strip())
        if not all(isinstance(part, element) for part in parts):
            raise UserError(f"{where}={text}: give whole numbers, separated by commas")
        return parts
    union = typing.get_origin(kind) in (typing.Union, types.UnionType)
    kinds = typing.get_args(kind) if union else (kind,)
    if types.NoneType in kinds and text == "null":
        return None
    for parse in (_PARSERS[kind] for kind in kinds if kind in _PARSERS):
        with suppress(ValueError, KeyError):
            return parse(text)
    return text


key_and_value = split  # replaced by `read` where a command declares its options
