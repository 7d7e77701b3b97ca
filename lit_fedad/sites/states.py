"""A site's personal states in one run, stored on the site's own disk."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lit_fedad.contracts.state import detached
from lit_fedad.core.errors import UserError
from lit_fedad.core.files import atomic, stored_text, unwritable_in_one_line
from lit_fedad.experiment.run_files import there
from lit_fedad.federation.checkpoint import read_state, write_state
from lit_fedad.federation.client_pool import State
from lit_fedad.sites.refusals import Code, RefusalError

FILES = "[0-9]" * 12 + ".pt"
"""Pattern of the names of files with states."""

_MOST = 64
"""Most states of a run that a site keeps: a round adds one for each exchange, and its end settles which are needed."""

_REFUSALS = {"number": Code.NUMBER, "images": Code.IMAGES, "model": Code.MODEL}


class States:
    """The personal states that a site had after the steps of a run, each in a file of its own.

    The coordinator says from which state a request starts, and which states are not needed any more. So a request that
    is sent twice has the same result twice, and a coordinator that has returned to its checkpoint finds the state of
    that time.

    Args:
        folder: The site's folder for the run.
        initial: State before the first step.
        **hashes: What must stay the same during a run, by name: the site's ``number``, and hashes of its ``images`` and
            its ``model``. They are compared in this order.

    Raises:
        RefusalError: If the run began with another number or hash.
    """

    def __init__(self, folder: Path, initial: State, **hashes: str) -> None:
        self.folder, self.initial, self.hashes = folder, detached(initial), hashes
        for name, expected in hashes.items():
            try:
                stored = stored_text(folder / name) if there(folder / name) else expected
            except (OSError, ValueError) as error:
                raise UserError(f"{folder / name}: cannot be read ({type(error).__name__})") from error
            if stored != expected:
                raise RefusalError(_REFUSALS[name])

    def begin(self) -> None:
        """Writes the number and the hashes to the run's folder, before its first state.

        Raises:
            UserError: If the folder cannot be written.
        """
        with unwritable_in_one_line(self.folder):
            for name, expected in self.hashes.items():
                if not (self.folder / name).exists():
                    with atomic(self.folder / name, durable=True) as partial:
                        partial.write_text(expected)

    def get(self, step: int) -> State:
        """Returns a copy of the state after a step; step 0 is the initial state.

        Raises:
            RefusalError: If there is no such state.
            UserError: If its file is damaged.
        """
        if step == 0:
            return detached(self.initial)
        path = self._path(step)
        if not path.exists():
            raise RefusalError(Code.STATE, step)
        state: State = read_state(path, advice="restore it from a copy, or begin another run")
        return state

    def put(self, step: int, state: State) -> None:
        """Writes the state after a step; the file is complete or absent.

        Raises:
            UserError: If there are too many states: the coordinator never says which are not needed any more.
        """
        if len(list(self.folder.glob(FILES))) >= _MOST and not self._path(step).exists():
            raise UserError(
                f"{self.folder}: holds {_MOST} states, and the coordinator has settled none of them"
            )
        with atomic(self._path(step), durable=True) as partial:
            write_state(detached(state), partial)

    def settle(self, settled: int, base: int) -> None:
        """Removes the states before step `settled`, except that of step `base`, from which the request starts."""
        for path in self.folder.glob(FILES):
            if int(path.stem) < settled and int(path.stem) != base:
                path.unlink(missing_ok=True)

    def _path(self, step: int) -> Path:
        return self.folder / f"{step:012d}.pt"


def digest_of(state: Any) -> str:
    """Computes a hash of a nested state: of its names, shapes, types and bytes.

    Example:
        >>> import torch
        >>> digest_of({"w": torch.zeros(2)}) == digest_of({"w": torch.zeros(2)})
        True
        >>> digest_of({"w": torch.zeros(2)}) == digest_of({"w": torch.zeros(2, 1)})
        False
    """
    digest = hashlib.sha256()
    for part in _parts(state, ""):
        digest.update(part)
    return digest.hexdigest()[:16]


def _parts(value: Any, name: str) -> Iterable[bytes]:
    """Yields the bytes to hash of a nested value, whose place in the state is `name`."""
    if isinstance(value, Mapping):
        for key in sorted(value, key=str):
            yield from _parts(value[key], f"{name}/{key}")
    elif isinstance(value, (list, tuple)):
        for index, entry in enumerate(value):
            yield from _parts(entry, f"{name}/{index}")
    elif isinstance(value, Tensor):
        yield json.dumps([name, str(value.dtype), list(value.shape)]).encode()
        yield value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    else:
        yield json.dumps([name, repr(value)]).encode()
