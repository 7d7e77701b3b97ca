"""The personal states of many clients, which share one live model."""

from __future__ import annotations

import contextlib
import shutil
from collections import OrderedDict
from collections.abc import Collection
from pathlib import Path
from typing import Any

from lit_fedad.contracts.state import detached, same, size_of
from lit_fedad.core.bounds import at_least
from lit_fedad.core.errors import RESTORE, UserError
from lit_fedad.core.files import link
from lit_fedad.federation.checkpoint import read_meta, read_state, write_state

State = dict[str, Any]


class ClientPool:
    """A store of personal states in host memory; states that exceed a size limit are moved to disk.

    Clients that are still in the initial state take no room, because that state is kept once for all. A new state is
    stored in addition to the previous one, until the server has decided whether the client's message counts (`settle`).

    Args:
        initial: The state of a client before its first exchange.
        folder: Folder for states that do not fit in memory; created on first use.
        memory_bytes: Limit of the host memory for states, in bytes.
    """

    def __init__(self, initial: State, folder: Path, memory_bytes: int = 2 << 30) -> None:
        self.initial = detached(initial)
        self.folder = folder
        self.memory_bytes = memory_bytes
        at_least("federation", 0, pool_bytes=memory_bytes)
        self._memory: OrderedDict[str, State] = OrderedDict()  # states by the name of their file
        self._files: set[str] = set()  # file names of states that are in the folder
        self._unsaved: set[str] = set()  # file names of states that changed since the last checkpoint
        self._held: set[int] = set()  # clients with a new state that is not settled
        self._bytes = 0  # size of the states in memory

    def __contains__(self, client: int) -> bool:
        return _name(client) in self._memory or _name(client) in self._files

    def get(self, client: int) -> State:
        """Returns a copy of a client's settled state."""
        name = _name(client)
        if name in self._memory:
            self._memory.move_to_end(name)
            # Optimisers update the given tensors in place: a failed exchange must not change the stored state.
            return detached(self._memory[name])
        if name in self._files:
            return read_state(self.folder / name)
        return detached(self.initial)

    def put(self, client: int, state: State) -> None:
        """Stores a copy of a client's state."""
        self._store(_name(client), state)
        self._unsaved.add(_name(client))

    def hold(self, client: int, state: State) -> None:
        """Stores a copy of a new state, which becomes the client's state if its message counts (`settle`)."""
        self._store(_held_name(client), state)
        self._held.add(client)

    def settle(self, counted: Collection[int]) -> None:
        """Replaces the states of clients whose messages count by their new ones; the others keep the previous state."""
        for client in sorted(self._held):
            if client in counted:
                self._move(_held_name(client), _name(client))
                self._unsaved.add(_name(client))
            else:
                self._drop(_held_name(client))
        self._held.clear()

    def _store(self, name: str, state: State) -> None:
        """Stores a copy of a state in memory, and moves the longest unused states to disk if the limit is exceeded."""
        self._drop(name)
        if same(state, self.initial):
            return
        self._memory[name] = detached(state)
        self._bytes += size_of(self._memory[name])
        # If the disk is full, the state stays in memory: it is not this client's failure, and the next checkpoint will
        # end the run.
        with contextlib.suppress(OSError):
            while self._bytes > self.memory_bytes and len(self._memory) > 1:
                self._spill(next(iter(self._memory)))

    def _move(self, old: str, new: str) -> None:
        """Stores a state under another name."""
        self._drop(new)
        if old in self._memory:
            self._memory[new] = self._memory.pop(old)
        elif old in self._files:
            (self.folder / old).replace(self.folder / new)
            self._files.remove(old)
            self._files.add(new)

    def _drop(self, name: str) -> None:
        """Forgets a state, if there is one of this name."""
        if name in self._memory:
            self._bytes -= size_of(self._memory.pop(name))
        self._files.discard(name)

    def _spill(self, name: str) -> None:
        """Moves a state from memory to disk."""
        self.folder.mkdir(parents=True, exist_ok=True)
        write_state(self._memory[name], self.folder / name)
        self._drop(name)
        self._files.add(name)

    def save(self, folder: Path, previous: Path | None) -> None:
        """Writes every state to a checkpoint; unchanged states are linked from the previous one."""
        previous_names = {path.name for path in previous.iterdir()} if previous else set()
        for name in sorted(self._memory.keys() | self._files):
            if name not in self._unsaved and previous and name in previous_names:
                link(previous / name, folder / name)
            elif name in self._memory:
                write_state(self._memory[name], folder / name)
            else:
                shutil.copyfile(self.folder / name, folder / name)
        self._unsaved.clear()

    def restore(self, folder: Path, clients: set[int]) -> None:
        """Loads the states of some clients from a checkpoint.

        Raises:
            UserError: If the file of one of them is missing, was changed, or lacks a part of the state.
        """
        files = read_meta(folder)["files"]
        for client in sorted(clients):
            if digest := files.get(_name(client)):
                state = read_state(folder / _name(client), digest)
                if absent := self.initial.keys() - state.keys():
                    raise UserError(f"{folder / _name(client)}: lacks {min(absent)}; {RESTORE}")
                self.put(client, state)
        self._unsaved.clear()


def _name(client: int) -> str:
    return f"client_{client:05d}.pt"


def _held_name(client: int) -> str:
    return f"held_{client:05d}.pt"
