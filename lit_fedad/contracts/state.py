"""State of objects, which a class declares by the names of its attributes, and helpers for nested states."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import copy
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lit_fedad.core.errors import UserError


def all_state_names(holder: object) -> tuple[str, ...]:
    """Lists the attributes that the classes of an object declare in ``state_names``, base classes first.

    Raises:
        TypeError: If a class declares a string instead of a tuple; its letters would be taken for names.
    """
    declared = {cls: vars(cls).get("state_names", ()) for cls in reversed(type(holder).__mro__)}
    for cls, names in declared.items():
        if isinstance(names, str):
            raise TypeError(f"{cls.__name__}: state_names={names!r} must be a tuple, ({names!r},)")
    return tuple(dict.fromkeys(name for names in declared.values() for name in names))


def state_of(holder: object) -> dict[str, Any]:
    """Returns the declared attributes by name; for modules copies of their state, for other values the values.

    Raises:
        UserError: If the object lacks a declared attribute.
    """
    names = all_state_names(holder)
    try:
        values = {name: getattr(holder, name) for name in names}
    except AttributeError as error:
        if error.obj is not holder or error.name not in names:  # a defect of a property
            raise
        raise UserError(
            f"{type(holder).__name__}: state_names has {error.name!r}, an attribute that it lacks; correct the name, or"
            " set it in __init__"
        ) from error
    return {
        name: {key: entry.detach().clone() for key, entry in value.state_dict().items()}
        if isinstance(value, nn.Module)
        else value
        for name, value in values.items()
    }


def load_state(holder: object, state: Mapping[str, Any]) -> None:
    """Sets the declared attributes from a state that `state_of` returned; properties are set by their setters."""
    for name in all_state_names(holder):
        value = state[name]
        # Reading a property may gather all weights of the task, which are not needed here.
        computed = isinstance(getattr(type(holder), name, None), property)
        if not computed and isinstance(current := getattr(holder, name), nn.Module):
            current.load_state_dict(value)
        else:
            setattr(holder, name, dict(value) if isinstance(value, dict) else value)


def take_sizes(module: nn.Module, names: Iterable[str], state: Mapping[str, Tensor], prefix: str) -> None:
    """Resizes buffers to the sizes that they have in a state, before it is loaded.

    Args:
        module: Module that holds the buffers.
        names: Names of the buffers.
        state: The state that will be loaded.
        prefix: Prefix of the module's entries in the state.
    """
    for name in names:
        if (entry := state.get(f"{prefix}{name}")) is not None:
            setattr(module, name, torch.empty_like(entry, device=getattr(module, name).device))


def mapped(state: Any, function: Callable[[Any], Any]) -> Any:
    """Applies a function to all values in nested dictionaries, lists, tuples and dataclasses; copies the containers."""
    if isinstance(state, Mapping):
        return {key: mapped(value, function) for key, value in state.items()}
    if isinstance(state, (list, tuple)):
        values = [mapped(value, function) for value in state]
        return type(state)(*values) if hasattr(state, "_fields") else type(state)(values)
    if is_dataclass(state):
        built = copy(state)
        for name, value in _parts(state):
            object.__setattr__(built, name, mapped(value, function))  # frozen dataclasses refuse setattr
        return built
    return function(state)


def _parts(state: Any) -> list[tuple[Any, Any]]:
    """Lists the keys of a container with their values; returns an empty list for any other value."""
    if isinstance(state, Mapping):
        return list(state.items())
    if isinstance(state, (list, tuple)):
        return list(enumerate(state))
    return (
        [(field.name, getattr(state, field.name)) for field in fields(state)] if is_dataclass(state) else []
    )


def leaves(state: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the values in nested containers with their dotted names; an empty container counts as a value."""
    if parts := _parts(state):
        for key, value in parts:
            yield from leaves(value, f"{name}.{key}" if name else str(key))
    else:
        yield name, state


def size_of(state: Any) -> int:
    """Computes the size of all tensors in a nested state, in bytes."""
    return sum(value.nbytes for _, value in leaves(state) if isinstance(value, Tensor))


def detached(state: Any) -> Any:
    """Copies a nested state to the CPU; the copy shares no memory with the live model."""
    return mapped(
        state, lambda value: value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value
    )


def same(state: Any, other: Any) -> bool:
    """Returns whether two nested states hold the same values."""

    def equal(one: Any, another: Any) -> bool:
        if isinstance(one, Tensor) and isinstance(another, Tensor):
            return one.dtype == another.dtype and torch.equal(one.cpu(), another.cpu())
        return type(one) is type(another) and bool(one == another)

    both = list(leaves(state)), list(leaves(other))
    return [name for name, _ in both[0]] == [name for name, _ in both[1]] and all(
        equal(one, another) for (_, one), (_, another) in zip(*both, strict=True)
    )
