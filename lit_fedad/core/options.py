"""Reads the ``key=value`` options of a command into the dataclass that declares them."""

import difflib
import inspect
import types
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from lit_fedad.core.building import call, check_arguments
from lit_fedad.core.errors import UserError
from lit_fedad.core.usage import Key

T = TypeVar("T")

_TRUTH = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
_PARSERS: dict[Any, Callable[[str], Any]] = {int: int, float: float, bool: lambda text: _TRUTH[text.lower()]}


def split(option: str) -> tuple[str, str]:
    """Splits an option at its first ``=`` into key and value.

    Raises:
        UserError: If it has none.
    """
    key, equals, value = option.partition("=")
    if not equals:
        raise UserError(f"'{option}' is not of the form key=value")
    return key, value


def read(
    declared: type[T], options: Sequence[str], command: str, overrides: bool = True
) -> tuple[T, dict[str, str]]:
    """Reads options into a dataclass; its fields are the keys, their types and defaults.

    Args:
        declared: A dataclass with fields of ``str``, ``int``, ``float``, ``bool``, ``Literal``, their union with
            ``None``, ``tuple[T, ...]`` (given with commas), or ``Mapping[str, str]`` (of the name ``root``: given as
            ``root.mpdd=DIR root.wafer=DIR``).
        options: Words of the form ``key=value``; of equal keys the last one counts. Text without a value (``out=``)
            counts as not given.
        command: Named in errors.
        overrides: Whether keys with a dot (``data.root=DIR``) that the dataclass does not declare are overrides of
            the configuration that the command works with; otherwise they are unknown.

    Returns:
        The dataclass; and the overrides, value by key.

    Raises:
        UserError: For an unknown key (naming the nearest one), a value of the wrong type, or one left out (with the
            usage of the command).

    Example:
        >>> from dataclasses import dataclass
        >>> @dataclass
        ... class Attack:
        ...     run: str
        ...     steps: int = 500
        >>> read(Attack, ["run=outputs/a", "steps=10", "data.root=/images"], "attack")
        (Attack(run='outputs/a', steps=10), {'data.root': '/images'})
    """
    values, others = parse(declared, options, command, overrides)
    _require_all(declared, values, command)
    return call(declared, values, command), others


def parse(
    declared: Callable[..., Any],
    options: Sequence[str],
    command: str,
    overrides: bool = True,
    leave: Collection[str] = (),
) -> tuple[dict[str, Any], dict[str, str]]:
    """Parses options by the types of what declares them, and checks nothing more."""
    kinds = {key: kind for key, kind in typing.get_type_hints(declared).items() if key not in leave}
    typed: dict[str, Any] = {}
    others: dict[str, str] = {}
    for key, text in dict(map(split, options)).items():
        field, _, name = key.partition(".")
        if _is_mapping(kinds.get(field)):
            if not name:
                raise UserError(f"{command}: give {field}.NAME=..., not {key}=...")
            typed.setdefault(field, {})[name] = text
        elif key in kinds:
            if text or kinds[key] is not str:
                typed[key] = _typed(text, kinds[key], f"{command}.{key}")
        elif name and overrides:
            others[key] = text
        else:
            typed[key] = text  # refused below, naming the nearest key
    return typed, others


def bind(
    function: Callable[..., Any], options: Sequence[str], command: str, **given: Any
) -> Callable[[], None]:
    """Binds options to the parameters of a command's function.

    Args:
        function: If its first parameter is a sequence, it takes the options as they are; if it is ``options``, a
            dataclass that they are read into. Otherwise the parameters are the keys. ``overrides`` takes the others.
        options: As for `read`.
        command: Named in errors.
        **given: Values of parameters that are no keys, as far as the function takes them.

    Raises:
        UserError: As `read`.

    Example:
        >>> def attack(run: str, steps: int = 500, overrides: Mapping[str, str] | None = None) -> None:
        ...     print(run, steps, overrides)
        >>> bind(attack, ["run=outputs/a", "steps=10", "data.root=/images"], "attack")()
        outputs/a 10 {'data.root': '/images'}
    """
    hints = typing.get_type_hints(function)
    first, kind = next(iter(hints.items()))
    given = {key: value for key, value in given.items() if key in hints}
    takes_overrides = "overrides" in hints
    if typing.get_origin(kind) is Sequence:
        return partial(function, options, **given)
    if first == "options":
        chosen, others = read(kind, options, command, takes_overrides)
        given = {**given, "overrides": others} if takes_overrides else given
        return partial(function, chosen, **given)
    values, others = parse(function, options, command, takes_overrides, {*given, "overrides", "return"})
    _require_all(function, values, command, {*given, "overrides"})
    given = {**given, "overrides": others} if takes_overrides else given
    check_arguments(function, command, values, given)
    return partial(function, **values, **given)


def separate(declared: type, options: Sequence[str], command: str) -> tuple[list[str], list[str]]:
    """Separates the options that a dataclass declares from all others.

    Args:
        declared: As for `read`.
        options: Options in any order; a key that Hydra leaves out (``~start``) is one of the others.
        command: Named in errors.

    Returns:
        Options that the dataclass declares, for `read`; and all others as they are, such as overrides for `compose`.

    Raises:
        UserError: If one of the others is close to a declared key: it is misspelt.

    Example:
        >>> from dataclasses import dataclass
        >>> @dataclass
        ... class Attack:
        ...     steps: int = 500
        >>> separate(Attack, ["rounds=3", "steps=10", "~start"], "attack")
        (['steps=10'], ['rounds=3', '~start'])
    """
    kinds = typing.get_type_hints(declared)
    chosen, others = [], []
    for option in options:
        key = "" if option.startswith("~") else split(option)[0]
        if key in kinds or _is_mapping(kinds.get(key.partition(".")[0])):
            chosen.append(option)
            continue
        if near := difflib.get_close_matches(key, kinds, n=1, cutoff=0.8):
            raise UserError(f"{command} has no key '{key}'; did you mean '{near[0]}'?")
        others.append(option)
    return chosen, others


def _require_all(
    declared: Callable[..., Any], values: Mapping[str, Any], command: str, leave: Collection[str] = ()
) -> None:
    """Refuses options in which a key is missing, and says how the command is typed."""
    parameters = {
        name: one for name, one in inspect.signature(declared).parameters.items() if name not in leave
    }
    needed = [name for name, one in parameters.items() if one.default is inspect.Parameter.empty]
    missing = [name for name in needed if name not in values]
    if missing and values.keys() <= parameters.keys():  # a misspelt key is told of instead
        kinds = typing.get_type_hints(declared)
        typed = [Key(name, None, "", _choices(kinds[name])).syntax for name in needed]
        words = " ".join(
            ["lit-fedad", command, *typed, *["[key=value ...]"][: len(parameters) > len(needed)]]
        )
        raise UserError(f"{command} needs '{missing[0]}': {words}; all keys: lit-fedad {command} --help")


def _choices(kind: Any) -> tuple[str, ...]:
    return typing.get_args(kind) if typing.get_origin(kind) is typing.Literal else ()


def _is_mapping(kind: Any) -> bool:
    return typing.get_origin(kind) is Mapping


def _typed(text: str, kind: Any, where: str) -> Any:
    """Turns text into what a field holds; what does not fit stays text, for the check of types to refuse."""
    if typing.get_origin(kind) is tuple:
        element = typing.get_args(kind)[0]
        parts = tuple(_typed(part.strip(), element, where) for part in text.split(",") if part.strip())
        if not all(isinstance(part, element) for part in parts):
            raise UserError(f"{where}={text} must be whole numbers, separated by commas")
        return parts
    union = typing.get_origin(kind) in (typing.Union, types.UnionType)
    kinds = typing.get_args(kind) if union else (kind,)
    if types.NoneType in kinds and text in ("null", ""):
        return None
    for parse in (_PARSERS[kind] for kind in kinds if kind in _PARSERS):
        with suppress(ValueError, KeyError):
            return parse(text)
    return text
