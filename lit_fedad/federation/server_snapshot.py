"""The server's state before a merge, to which it returns where merging fails."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import deepcopy
from typing import Any

from torch import Tensor

from lit_fedad.contracts import Server
from lit_fedad.contracts.state import load_state, state_of


class ServerSnapshot:
    """A snapshot that shares the server's tensors and copies what holds them.

    It costs no memory: servers replace their tensors (`Server.aggregate`), so that those of the snapshot stay as they
    were. `check` finds a server that does not.
    """

    def __init__(self, server: Server) -> None:
        self.server, self.state = server, _copied(state_of(server))
        self._versions = {name: tensor._version for name, tensor in _tensors(self.state)}

    def check(self) -> None:
        """Checks that no tensor has changed since.

        Raises:
            TypeError: If one has, by the names of the server's class and of the attribute.
        """
        for name, tensor in _tensors(self.state):
            if tensor._version != self._versions[name]:
                raise TypeError(
                    f"{type(self.server).__name__}: merging changes '{name}' in place; put a new tensor there, so that"
                    " the server can return to its state before"
                )

    def restore(self) -> None:
        """Returns the server to this state; the snapshot can be used again."""
        self.check()
        load_state(self.server, _copied(self.state))


def _copied(value: Any) -> Any:
    """Copies containers, and values of other types; shares tensors whose changes are counted."""
    if isinstance(value, Tensor):
        return value.clone() if value.is_inference() else value
    if isinstance(value, Mapping):
        return {key: _copied(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        entries = [_copied(entry) for entry in value]
        return type(value)(*entries) if hasattr(value, "_fields") else type(value)(entries)
    return deepcopy(value)


def _tensors(value: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, entry in value.items():
            yield from _tensors(entry, f"{name}.{key}" if name else str(key))
    elif isinstance(value, (list, tuple)):
        for place, entry in enumerate(value):
            yield from _tensors(entry, f"{name}.{place}")
