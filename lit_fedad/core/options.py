"""Binds the ``key=value`` words of a command to the parameters of its function."""

import difflib
import inspect
import types
import typing
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import is_dataclass
from functools import partial
from typing import Any

from lit_fedad.core.building import alternatives, check_keys, check_type
from lit_fedad.core.errors import UserError
from lit_fedad.core.usage import Key

_TRUTH = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
_PARSERS: dict[Any, Callable[[str], Any]] = {int: int, float: float, bool: lambda text: _TRUTH[text.lower()]}


def split(option: str) -> tuple[str, str]:
    """Splits an option at its first ``=`` into key and value.

    Raises:
        UserError: If it has no ``=``.
    """
    key, equals, value = option.partition("=")
    if not equals:
        raise UserError(f"'{option}' is not of the form key=value")
    return key, value


def section_of(override: str) -> str:
    """Returns the section of the configuration to which an override belongs.

    Example:
        >>> [section_of(word) for word in ("data.root=x", "data=folders", "~data.anomalies.imagenet")]
        ['data', 'data', 'data']
    """
    return override.lstrip("+~").partition("=")[0].partition(".")[0]


def key_of(override: str) -> str:
    """Returns the dotted key that an override sets.

    Example:
        >>> [key_of(word) for word in ("++data.root=x", "data/public=folder", "--cfg")]
        ['data.root', 'data.public', '--cfg']
    """
    return override.lstrip("+~").partition("=")[0].replace("/", ".")


def overridden_twice(overrides: Sequence[str]) -> dict[str, str]:
    """Finds overrides whose key a later override sets to another value; returns the last override for each of them.

    Example:
        >>> overridden_twice(["rounds=3", "seed=1", "image={size: 32}", "++rounds=5", "seed=1", "image={fit: pad}"])
        {'rounds=3': '++rounds=5'}
    """
    # Sections are merged, and a removed key may be added again: such overrides do not overrule each other.
    words = [word for word in overrides if not word.startswith("~") and "={" not in word]
    last = {key_of(word): word for word in words}
    return {word: last[key_of(word)] for word in words if last[key_of(word)] != word}


def bind(function: Callable[..., Any], words: Sequence[str], command: str, **given: Any) -> Callable[[], Any]:
    """Binds the words of a command to its function, whose parameters are the keys.

    Args:
        function: The function. Its parameters have the types ``str``, ``int``, ``float``, ``bool``, ``Literal``, their
            union with ``None``, ``tuple[T, ...]`` (given with commas), or ``Mapping[str, str]`` (a parameter ``root``
            is given as ``root.mpdd=DIR root.wafer=DIR``). A dataclass stands for its fields. A parameter ``overrides``
            takes the other words: as a mapping the values of keys with a dot (``data.root=DIR``), as a sequence all
            words unchanged.
        words: Words of the form ``key=value``. If a key is given several times, the last word counts, and a warning
            names the others. A key for text without a value (``out=``) counts as not given.
        command: Name of the command in errors.
        **given: Values of parameters that are no keys; those that the function does not take are ignored.

    Raises:
        UserError: For an unknown key (the error names the most similar one), a value of the wrong type, or a missing
            key (the error shows the usage of the command).

    Example:
        >>> def attack(run: str, steps: int = 500, overrides: Mapping[str, str] | None = None) -> None:
        ...     print(run, steps, overrides)
        >>> bind(attack, ["run=outputs/a", "steps=10", "data.root=/images"], "attack")()
        outputs/a 10 {'data.root': '/images'}
    """
    for earlier, later in overridden_twice(words).items():
        warnings.warn(f"{earlier} has no effect: {later} is given after it", stacklevel=1)
    hints = typing.get_type_hints(function)
    given = {key: value for key, value in given.items() if key in hints}
    keys = list(_keys(function, {*given, "overrides"}))
    kinds = {name: kind for name, kind, _ in keys}
    dotted, others = "overrides" in hints, list(words)
    if dotted and typing.get_origin(hints["overrides"]) is Sequence:
        words, others = _separate(kinds, words, command) if kinds else ([], others)
        given["overrides"], dotted = others, False
    values, by_key = _parse(kinds, words, command, dotted)
    if dotted:
        given["overrides"] = by_key
    _require_all(keys, values, command)
    check_keys(values, set(kinds), command)
    for key, value in values.items():
        check_type(value, kinds[key], f"{command}.{key}")
    for name in inspect.signature(function).parameters.keys() - given.keys():
        if is_dataclass(kind := hints[name]):
            fields = {field: values.pop(field) for field, _, _ in _keys(kind) if field in values}
            given[name] = kind(**fields)  # type: ignore[operator]
    return partial(function, **values, **given)


def _keys(declared: Any, leave: Collection[str] = ()) -> Iterator[tuple[str, Any, bool]]:
    """Yields each key that a function or dataclass declares: its name, its type, and whether it must be given."""
    hints = typing.get_type_hints(declared)
    for name, parameter in inspect.signature(declared).parameters.items():
        if name in leave:
            continue
        if is_dataclass(hints[name]):
            yield from _keys(hints[name])
        else:
            yield name, hints[name], parameter.default is inspect.Parameter.empty


def _separate(kinds: Mapping[str, Any], words: Sequence[str], command: str) -> tuple[list[str], list[str]]:
    """Separates the words of declared keys from all others, such as overrides and removals for Hydra (``~start``).

    Raises:
        UserError: If another word resembles a declared key, so that it is probably misspelt.
    """
    chosen, others = [], []
    for word in words:
        key = "" if word.startswith("~") else split(word)[0]
        if key in kinds or _is_mapping(kinds.get(key.partition(".")[0])):
            chosen.append(word)
            continue
        if near := difflib.get_close_matches(key, kinds, n=1, cutoff=0.8):
            raise UserError(f"{command} has no key '{key}'; did you mean '{near[0]}'?")
        others.append(word)
    return chosen, others


def _parse(
    kinds: Mapping[str, Any], words: Sequence[str], command: str, dotted: bool
) -> tuple[dict[str, Any], dict[str, str]]:
    """Parses words by the types of their keys.

    Args:
        kinds: Types by key.
        words: The words.
        command: Name of the command in errors.
        dotted: Whether the command takes undeclared keys with a dot.

    Returns:
        The parsed values by key, and the texts of undeclared keys with a dot.
    """
    typed: dict[str, Any] = {}
    others: dict[str, str] = {}
    for key, text in dict(map(split, words)).items():
        field, _, name = key.partition(".")
        if _is_mapping(kinds.get(field)):
            if not name:
                raise UserError(f"{command}: give {field}.NAME=..., not {key}=...")
            typed.setdefault(field, {})[name] = text
        elif key in kinds:
            if text or kinds[key] is not str:
                typed[key] = _typed(text, kinds[key], f"{command}.{key}")
        elif name and dotted:
            others[key] = text
        else:
            typed[key] = text  # `check_keys` refuses it later, and names the most similar key
    return typed, others


def _require_all(keys: Sequence[tuple[str, Any, bool]], values: Mapping[str, Any], command: str) -> None:
    """Refuses words in which a required key is missing; the error shows the usage of the command."""
    needed = {name: kind for name, kind, must in keys if must}
    missing = [name for name in needed if name not in values]
    if missing and values.keys() <= {name for name, _, _ in keys}:  # else `check_keys` reports a misspelt key
        typed = [Key(name, None, "", _choices(kind)).syntax for name, kind in needed.items()]
        usage = " ".join(["lit-fedad", command, *typed, *["[key=value ...]"][: len(keys) > len(needed)]])
        raise UserError(f"{command} needs '{missing[0]}': {usage}; all keys: lit-fedad {command} --help")


def _choices(kind: Any) -> tuple[str, ...]:
    return typing.get_args(kind) if typing.get_origin(kind) is typing.Literal else ()


def _is_mapping(kind: Any) -> bool:
    return typing.get_origin(kind) is Mapping


def _typed(text: str, kind: Any, where: str) -> Any:
    """Parses text as a value of a type; text that does not fit is returned unchanged, and `check_type` refuses it."""
    if typing.get_origin(kind) is tuple:
        element = typing.get_args(kind)[0]
        parts = tuple(_typed(part.strip(), element, where) for part in text.split(",") if part.strip())
        if not all(isinstance(part, element) for part in parts):
            raise UserError(f"{where}={text} must be whole numbers, separated by commas")
        return parts
    kinds = alternatives(kind)
    if types.NoneType in kinds and text in ("null", ""):
        return None
    for parse in (_PARSERS[kind] for kind in kinds if kind in _PARSERS):
        with suppress(ValueError, KeyError):
            return parse(text)
    return text
