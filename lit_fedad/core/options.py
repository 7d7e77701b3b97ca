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
        UserError: If it has none.
    """
    key, equals, value = option.partition("=")
    if not equals:
        raise UserError(f"'{option}' is not of the form key=value")
    return key, value


def section_of(override: str) -> str:
    """Returns the configuration's section that an override is of.

    Example:
        >>> [section_of(word) for word in ("data.root=x", "data=folders", "~data.anomalies.imagenet")]
        ['data', 'data', 'data']
    """
    return override.lstrip("+~").partition("=")[0].partition(".")[0]


def key_of(override: str) -> str:
    """Returns the dotted key that an override gives.

    Example:
        >>> [key_of(word) for word in ("++data.root=x", "data/public=folder", "--cfg")]
        ['data.root', 'data.public', '--cfg']
    """
    return override.lstrip("+~").partition("=")[0].replace("/", ".")


def overruled(overrides: Sequence[str]) -> dict[str, str]:
    """Finds those of a command's overrides whose key it gives again, with another value; returns the last of each.

    Example:
        >>> overruled(["rounds=3", "seed=1", "image={size: 32}", "++rounds=5", "seed=1", "image={fit: pad}"])
        {'rounds=3': '++rounds=5'}
    """
    # Parts of a section are merged, and what is removed may be added anew.
    overrides = [given for given in overrides if not given.startswith("~") and "={" not in given]
    last = {key_of(given): given for given in overrides}
    return {given: last[key_of(given)] for given in overrides if last[key_of(given)] != given}


def bind(function: Callable[..., Any], words: Sequence[str], command: str, **given: Any) -> Callable[[], Any]:
    """Binds the words of a command to its function, whose parameters are the keys.

    Args:
        function: Its parameters are of ``str``, ``int``, ``float``, ``bool``, ``Literal``, their union with ``None``,
            ``tuple[T, ...]`` (given with commas), or ``Mapping[str, str]`` (of the name ``root``: given as
            ``root.mpdd=DIR root.wafer=DIR``). A dataclass stands for its fields. ``overrides`` takes what is no key: a
            mapping the values of keys with a dot (``data.root=DIR``), a sequence all words as they are.
        words: Of the form ``key=value``; of equal keys the last one counts, and others are warned of. Text without a
            value (``out=``) counts as not given.
        command: Named in errors.
        **given: Values of parameters that are no keys, as far as the function takes them.

    Raises:
        UserError: For an unknown key (naming the nearest one), a value of the wrong type, or one left out (with the
            usage of the command).

    Example:
        >>> def attack(run: str, steps: int = 500, overrides: Mapping[str, str] | None = None) -> None:
        ...     print(run, steps, overrides)
        >>> bind(attack, ["run=outputs/a", "steps=10", "data.root=/images"], "attack")()
        outputs/a 10 {'data.root': '/images'}
    """
    for earlier, later in overruled(words).items():
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
    """Yields name, type and whether it must be given of each key that a function, or a dataclass, declares."""
    hints = typing.get_type_hints(declared)
    for name, parameter in inspect.signature(declared).parameters.items():
        if name in leave:
            continue
        if is_dataclass(hints[name]):
            yield from _keys(hints[name])
        else:
            yield name, hints[name], parameter.default is inspect.Parameter.empty


def _separate(kinds: Mapping[str, Any], words: Sequence[str], command: str) -> tuple[list[str], list[str]]:
    """Separates the words of declared keys from all others, such as overrides and what Hydra leaves out (``~start``).

    Raises:
        UserError: If one of the others is close to a declared key: it is misspelt.
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
    """Parses words by the types of their keys: the values, and, where they are taken, those of keys with a dot."""
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
            typed[key] = text  # refused later, naming the nearest key
    return typed, others


def _require_all(keys: Sequence[tuple[str, Any, bool]], values: Mapping[str, Any], command: str) -> None:
    """Refuses words in which a key is missing, and says how the command is typed."""
    needed = {name: kind for name, kind, must in keys if must}
    missing = [name for name in needed if name not in values]
    if missing and values.keys() <= {name for name, _, _ in keys}:  # a misspelt key is told of instead
        typed = [Key(name, None, "", _choices(kind)).syntax for name, kind in needed.items()]
        usage = " ".join(["lit-fedad", command, *typed, *["[key=value ...]"][: len(keys) > len(needed)]])
        raise UserError(f"{command} needs '{missing[0]}': {usage}; all keys: lit-fedad {command} --help")


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
    kinds = alternatives(kind)
    if types.NoneType in kinds and text in ("null", ""):
        return None
    for parse in (_PARSERS[kind] for kind in kinds if kind in _PARSERS):
        with suppress(ValueError, KeyError):
            return parse(text)
    return text
