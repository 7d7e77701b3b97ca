"""Reads JSON and YAML that may come from anybody: only strings, finite numbers, lists and dictionaries are accepted."""

import json
import math
from typing import Any

import yaml
from yaml.composer import Composer

# Levels of lists and dictionaries: far more than any file has, and readers call themselves by level.
_MAX_DEPTH = 100


def plain_json(content: str | bytes) -> Any:
    """Reads JSON as commands write it: numbers are finite, and whole numbers fit into 64 bits.

    Raises:
        ValueError: If it is no such JSON, or nested too deeply.
    """
    try:
        value = json.loads(content, parse_int=_whole, parse_float=_finite, parse_constant=_finite)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    _check_depth(value)
    return value


def _whole(text: str) -> int:
    if len(text) > 20 or abs(number := int(text)) >= 1 << 63:
        raise ValueError(f"the number {text[:20]}... is too large")
    return number


def _finite(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise ValueError(f"{text[:20]} is no finite number")
    return number


class _PlainLoader(Composer, yaml.CSafeLoader):
    """A YAML loader that refuses merge keys (``<<``): no file of a run has them, and they can multiply the content.

    The parser is that of libyaml, which is fast; the composer is that of Python, because libyaml's crashes the process
    on deep nesting.
    """

    def __init__(self, content: str) -> None:
        Composer.__init__(self)
        yaml.CSafeLoader.__init__(self, content)

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        if any(key.tag == "tag:yaml.org,2002:merge" for key, _ in node.value):
            raise yaml.YAMLError("merge keys (<<) are not read")
        super().flatten_mapping(node)


def plain_yaml(content: str) -> Any:
    """Reads YAML with strings, finite numbers, truth values, lists, and dictionaries whose keys are strings.

    Raises:
        yaml.YAMLError: If it holds anything else, or its parts refer to each other so often that they explode.
    """
    try:
        value = yaml.load(content, _PlainLoader)  # noqa: S506 (a safe loader)
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        raise yaml.YAMLError(f"{type(error).__name__}: {error}") from error  # raised by YAML's constructors
    try:
        check_unfolded(value)
        _check_depth(value)
        _check_plain(value)
    except (ValueError, RecursionError) as error:
        raise yaml.YAMLError(str(error)) from error
    return value


def _check_depth(value: Any) -> None:
    """Refuses more than `_MAX_DEPTH` levels of lists and dictionaries."""
    level = [value]
    for _ in range(_MAX_DEPTH + 1):
        level = [part for part in level if isinstance(part, (dict, list))]
        level = [inner for part in level for inner in (part.values() if isinstance(part, dict) else part)]
        if not level:
            return
    raise ValueError("nested too deeply")


def _check_plain(value: Any) -> None:
    """Refuses values other than those that `plain_yaml` returns."""
    if isinstance(value, dict):
        if not all(isinstance(key, str) for key in value):
            raise ValueError("a key is no text")
        value = list(value.values())
    for part in value if isinstance(value, list) else ():
        _check_plain(part)
    whole = isinstance(value, int) and abs(value) < 1 << 63
    if not (
        whole or isinstance(value, list | str | None) or (isinstance(value, float) and math.isfinite(value))
    ):
        raise ValueError(f"a value of it is {type(value).__name__}, or too large")


def check_unfolded(value: Any) -> None:
    """Refuses nested lists and dictionaries that share parts so often that walking through them would never end.

    Raises:
        ValueError: If a walk would visit far more values than there are.
    """
    sizes: dict[int, float] = {}
    values = 0

    def count(part: Any) -> float:
        nonlocal values
        if not isinstance(part, (dict, list, tuple)):
            return 1
        if id(part) not in sizes:
            sizes[id(part)] = math.inf  # stays so for a container that contains itself
            inner = list(part.values()) if isinstance(part, dict) else part
            values += len(inner)
            sizes[id(part)] = 1 + sum(map(count, inner))
        return sizes[id(part)]

    if count(value) > 10 * values + 1000:
        raise ValueError("its parts refer to each other again and again")
