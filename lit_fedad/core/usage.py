"""The keys of a command, as the signature and the docstring of what declares them tell."""

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, NamedTuple

_GIVEN = ("display", "overrides", "return")  # parameters of a command's function that are no keys


class Key(NamedTuple):
    """A key of a command.

    Attributes:
        name: As it is given; ``root.NAME`` for one that takes several values by name.
        default: Text of its default; None where it must be given.
        meaning: What it does.
        choices: Its values, where it takes no others.
    """

    name: str
    default: str | None
    meaning: str
    choices: tuple[str, ...] = ()

    @property
    def syntax(self) -> str:
        """How it is given: ``run=RUN``, ``attack=lira|dcor``."""
        return f"{self.name}={'|'.join(self.choices) or self.name.rpartition('.')[2].upper()}"


def keys(declared: Callable[..., Any]) -> list[Key]:
    """Lists the keys of a command: fields of a dataclass, or parameters of a function (`lit_fedad.core.options`).

    There are none of a function that takes a sequence of words as they are.

    Example:
        >>> def attack(run: str, steps: int = 500) -> None:
        ...     '''Attacks a run.
        ...
        ...     Args:
        ...         run: The run's folder; None for
        ...             the newest.
        ...         steps: Number of steps.
        ...     '''
        >>> keys(attack)
        [Key(name='run', default=None, meaning="The run's folder; null for the newest.", choices=()), \
Key(name='steps', default='500', meaning='Number of steps.', choices=())]
    """
    kinds = typing.get_type_hints(declared)
    first = next(iter(kinds), "")
    if typing.get_origin(kinds.get(first)) is Sequence and not is_dataclass(declared):
        return []
    meanings = _meanings(declared)
    if first == "options":
        listed = keys(kinds["options"])
    else:
        listed = [
            Key(f"{name}.NAME", "", meanings.get(name, ""))
            if typing.get_origin(kind := kinds[name]) is Mapping
            else Key(
                name,
                None if default is inspect.Parameter.empty else _text(default),
                meanings.get(name, ""),
                typing.get_args(kind) if typing.get_origin(kind) is typing.Literal else (),
            )
            for name, default in _defaults(declared).items()
            if name not in _GIVEN
        ]
    if "overrides" in kinds:
        listed.append(Key("SECTION.KEY", "", meanings.get("overrides", "")))
    return listed


def usage(declared: Callable[..., Any], command: str) -> str:
    """Returns the line that a user types: the keys that must be given, and whether there are others."""
    listed = keys(declared)
    needed = [key.syntax for key in listed if key.default is None]
    more = ["[key=value ...]"] if len(needed) < len(listed) else []
    return " ".join(["lit-fedad", command, *needed, *more])


def _defaults(declared: Callable[..., Any]) -> dict[str, Any]:
    """Returns default by key; `inspect.Parameter.empty` where there is none."""
    defaults = {name: one.default for name, one in inspect.signature(declared).parameters.items()}
    if isinstance(declared, type) and is_dataclass(declared):
        made = {one.name: one.default_factory for one in fields(declared)}
        defaults |= {name: make() for name, make in made.items() if make is not MISSING}
    return defaults


def _text(value: Any) -> str:
    """Writes a value as a user gives it."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _meanings(declared: Callable[..., Any]) -> dict[str, str]:
    """Reads the entries of ``Args`` or ``Attributes`` in a docstring, in the words of the command line."""
    text = inspect.getdoc(declared) or ""
    section = re.search(r"^(?:Args|Attributes):\n((?: {4}.*\n?|\n)+)", text, re.M)
    entries = re.findall(r"^ {4}\**(\w+): (.*(?:\n {8}.*)*)", section[1] if section else "", re.M)
    words = {"None": "null", "True": "true", "False": "false"}
    return {
        name: re.sub(
            r"\b(None|True|False)\b", lambda found: words[found[0]], " ".join(meaning.split())
        ).replace("`", "")
        for name, meaning in entries
    }
