"""State that a class declares by the names of its attributes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn


def all_state_names(holder: object) -> tuple[str, ...]:
    """Lists the attributes that the classes of an object declare in ``state_names``, base classes first."""
    classes = reversed(type(holder).__mro__)
    return tuple(dict.fromkeys(name for cls in classes for name in vars(cls).get("state_names", ())))


def state_of(holder: object) -> dict[str, Any]:
    """Returns the declared attributes by name: copies of the state of modules, other values as they are."""
    values = {name: getattr(holder, name) for name in all_state_names(holder)}
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
        # Reading a property may gather all weights of the task, for nothing.
        given = isinstance(getattr(type(holder), name, None), property)
        if not given and isinstance(current := getattr(holder, name), nn.Module):
            current.load_state_dict(value)
        else:
            setattr(holder, name, dict(value) if isinstance(value, dict) else value)
