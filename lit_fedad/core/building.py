"""Builds objects from sections of the configuration.

``_target_`` names a class or function, whose signature is the schema of its section. A class whose constructor passes
keywords on (``**options``) also takes the arguments of its base class.
"""

import difflib
import importlib
import inspect
import math
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeVar

from lit_fedad.core.errors import UserError
from lit_fedad.core.extras import extra_of, install

T = TypeVar("T")

# Names of types in error messages; a path is a string in the configuration.
_CONFIG_TYPES: dict[Any, str] = {
    int: "int", float: "float", bool: "bool", str: "str", Path: "str", types.NoneType: "null",
    list: "list", tuple: "list", Sequence: "list",
}  # fmt: skip

# Types of values that the configuration holds directly, in contrast to objects that are built from sections.
_PLAIN = (bool, int, float, str, types.NoneType, Mapping, list)


def build(node: Any, key: str = "", /, **given: Any) -> Any:
    """Builds the object that a configuration node describes.

    Args:
        node: A mapping with ``_target_`` (and ``_partial_: true`` for a factory), whose other keys are arguments;
            nested nodes are built first. None stays None.
        key: Dotted key of the node in the configuration, which errors name; without it they name the target.
        **given: Arguments that the configuration cannot hold, such as other objects.

    Raises:
        UserError: For a key that the target does not take, a value of the wrong type, or a missing key.
    """
    if node is None:
        return None
    if not isinstance(node, Mapping) or "_target_" not in node:
        raise UserError(f"{key and f'{key}='}{node!r} must be a section with _target_")
    target = locate(node["_target_"])
    arguments = {k: v for k, v in node.items() if k not in ("_target_", "_partial_")}
    name = key or node["_target_"].rpartition(".")[2]
    check_arguments(target, name, arguments, given, bool(node.get("_partial_")))
    arguments = {k: _build_nested(v, f"{name}.{k}") for k, v in arguments.items()}
    if node.get("_partial_"):
        return partial(target, **arguments, **given)
    return target(**arguments, **given)


def takes(node: Mapping[str, Any], argument: str) -> bool:
    """Returns whether the target of a configuration node takes an argument of this name."""
    return argument in parameters_of(locate(node["_target_"]))


def targets(node: Any) -> Iterator[Any]:
    """Yields the value of every ``_target_`` in nested sections and lists, whatever its type."""
    if isinstance(node, Mapping):
        if "_target_" in node:
            yield node["_target_"]
        node = list(node.values())
    for part in node if isinstance(node, list) else ():
        yield from targets(part)


def call(target: Callable[..., T], section: Mapping[str, Any], name: str, **given: Any) -> T:
    """Calls a function or class with the arguments in a section without ``_target_``.

    Args:
        target: The function or class.
        section: Its arguments.
        name: Name of the section in errors.
        **given: Arguments that the configuration cannot hold.

    Raises:
        UserError: As in `build`.
    """
    check_arguments(target, name, section, given)
    return target(**section, **given)


def _build_nested(value: Any, key: str) -> Any:
    if isinstance(value, Mapping) and "_target_" in value:
        return build(value, key)
    if isinstance(value, Mapping):
        return {k: _build_nested(v, f"{key}.{k}") for k, v in value.items()}
    if isinstance(value, list):
        return [_build_nested(v, f"{key}[{number}]") for number, v in enumerate(value)]
    return value


def locate(path: str) -> Any:
    """Imports the class or function that a ``_target_`` names.

    Raises:
        UserError: If it does not exist.
    """
    module, _, name = path.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        extra = extra_of(error.name or "") if isinstance(error, ImportError) else None
        advice = f"; {install(extra)}" if extra else ""
        raise UserError(f"_target_ '{path}' cannot be imported: {error}{advice}") from error


def check_arguments(
    target: Callable[..., Any],
    name: str,
    arguments: Mapping[str, Any],
    given: Mapping[str, Any],
    some_left: bool = False,
) -> None:
    """Refuses arguments that a function or class does not take, arguments of the wrong type, and missing ones.

    Args:
        target: The function or class.
        name: Name of its section in errors.
        arguments: Arguments from the configuration.
        given: Further arguments, from code.
        some_left: Whether arguments may be missing.

    Raises:
        UserError: As in `build`.
    """
    parameters = parameters_of(target)
    try:
        inspect.signature(target).bind_partial(**given)
    except TypeError as error:
        raise UserError(f"{name}._target_ does not go here: {error}") from error
    check_keys(arguments, set(parameters) - set(given), name)
    for key, value in arguments.items():
        check_type(value, _annotations(target).get(key, Any), f"{name}.{key}")
    if not some_left:
        missing = [
            key
            for key, parameter in parameters.items()
            if parameter.default is parameter.empty and key not in arguments and key not in given
        ]
        if missing:
            raise UserError(f"{name} needs '{missing[0]}'")


def _takers(target: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    """Yields a function or class, and then its base classes as long as constructors pass keywords on."""
    takers: list[Callable[..., Any]] = [target]
    if inspect.isclass(target):
        takers += [kind for kind in target.__mro__ if "__init__" in vars(kind)][1:]
    for taker in takers:
        yield taker
        if all(one.kind is not one.VAR_KEYWORD for one in inspect.signature(taker).parameters.values()):
            return


@cache
def parameters_of(target: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Returns the named parameters of a function or class, with those of its base classes."""
    parameters: dict[str, inspect.Parameter] = {}
    try:
        for taker in _takers(target):
            parameters = {**inspect.signature(taker).parameters, **parameters}
    except (TypeError, ValueError) as error:  # no function or class, or one written in C without a signature
        raise UserError(f"_target_ {target!r} is nothing that a section can describe: {error}") from error
    unnamed = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return {name: parameter for name, parameter in parameters.items() if parameter.kind not in unnamed}


@cache
def _annotations(target: Callable[..., Any]) -> dict[str, Any]:
    """Returns the types of the parameters of a function or class, as far as its annotations can be resolved."""
    annotations: dict[str, Any] = {}
    for taker in _takers(target):
        try:
            hints = typing.get_type_hints(taker.__init__ if inspect.isclass(taker) else taker)  # type: ignore[misc]
        except (NameError, TypeError):
            break
        annotations = {**hints, **annotations}
    return annotations


def options_of(target: Callable[..., Any], argument: str) -> tuple[str, ...]:
    """Returns the strings that an argument accepts (``Literal``); empty if it accepts any string, or none."""
    parts = alternatives(_annotations(target).get(argument, Any))
    literals = [part for part in parts if typing.get_origin(part) is typing.Literal]
    return tuple(option for part in literals for option in typing.get_args(part) if isinstance(option, str))


def alternatives(annotation: Any) -> tuple[Any, ...]:
    """Returns the types of a union; for any other type, a tuple of that type."""
    union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    return typing.get_args(annotation) if union else (annotation,)


def check_type(value: Any, annotation: Any, where: str) -> None:
    """Refuses scalars, paths and lists of the wrong type; values of other types are checked by the target."""
    if typing.get_origin(annotation) is typing.Literal:
        choices = typing.get_args(annotation)
        if value not in choices:
            shown = ["null" if one is None else one for one in choices]
            raise UserError(f"{where}={value!r} must be one of {shown}")
        return
    if isinstance(value, float) and not math.isfinite(value):
        raise UserError(f"{where}={value} must be a finite number")
    if isinstance(value, Mapping) and "_target_" in value:
        return
    accepted = [typing.get_origin(one) or one for one in alternatives(annotation)]
    kinds = {_CONFIG_TYPES.get(one) for one in accepted}
    if None in kinds:
        _check_built(value, accepted, where)
        return
    kind = _CONFIG_TYPES.get(type(value))
    if kind not in kinds and not (kind == "int" and "float" in kinds):
        one_of_a_list = kinds - {"null"} == {"list"} and kind in ("str", "int", "float")
        example = f"; give [{value}]" if one_of_a_list else ""
        raise UserError(f"{where}={value!r} must be {' or '.join(sorted(map(str, kinds)))}{example}")
    element_types = [typing.get_args(one)[:1] for one in alternatives(annotation) if typing.get_args(one)]
    if kind == "list" and element_types in ([(float,)], [(str,)]):
        for number, part in enumerate(value):
            check_type(part, element_types[0][0], f"{where}[{number}]")


def _check_built(value: Any, accepted: Sequence[Any], where: str) -> None:
    """Refuses a plain value where only objects of classes are accepted, which are built from sections."""
    classes = all(inspect.isclass(one) and one not in (Any, object, dict) for one in accepted)
    checked = tuple(one for one in accepted if not getattr(one, "_is_protocol", False))
    # The learning rate of torch's optimisers is a number or a tensor, and may be a whole number.
    whole_float = type(value) is int and float in accepted
    if classes and isinstance(value, _PLAIN) and not (whole_float or isinstance(value, checked)):
        raise UserError(f"{where}={'null' if value is None else value} must be a section with _target_")


def check_keys(mapping: Mapping[str, Any], known: set[str], where: str) -> None:
    """Refuses the first key that is not known; the error names the most similar known key."""
    for key in mapping:
        if key not in known:
            raise UserError(f"{where} has no key '{key}'{nearest(key, known)}")


def nearest(key: str, known: Iterable[str]) -> str:
    """Returns the end of an error message: the key that was perhaps meant, or all valid keys."""
    names = {name.lower(): name for name in sorted(known)}
    close = difflib.get_close_matches(key.lower(), names, n=1, cutoff=0.5)
    if close:
        return f"; did you mean '{names[close[0]]}'?"
    return f"; valid keys: {', '.join(names.values()) or 'none'}"
