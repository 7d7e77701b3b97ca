"""The lock of a run's folder: one command at a time writes there."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from lit_fedad.core.config import Config
from lit_fedad.core.errors import UserError

LOCK = ".lock"

# Set in processes that a launcher or the first process started.
_RANKS = ("RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "SLURM_PROCID")


@contextmanager
def locked(folder: Path, patience: float = 0.0) -> Iterator[None]:
    """Holds a folder's lock for a block; the system releases that of a process that was killed.

    Args:
        folder: The folder.
        patience: How long another process is waited for, in seconds.

    Raises:
        UserError: If another process holds it, or the folder cannot be written.
    """
    lock = FileLock(folder / LOCK, timeout=patience)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout:
        raise UserError(
            f"{folder}: another lit-fedad command is at work in this folder; wait for its end, or end it, or give"
            " another folder"
        ) from None
    except NotImplementedError:
        warnings.warn(f"{folder}: its file system has no locks; start no second command on it", stacklevel=3)
    except OSError as error:
        raise UserError(f"{folder}: cannot be written ({error.strerror})") from error
    try:
        yield
    finally:
        lock.release()


def launches(config: Config) -> bool:
    """Tells whether this process is the one that the user started, which locks the folder for all others.

    On one machine Fabric starts processes that never come here. On several machines, or under a launcher, each process
    runs the whole command.
    """
    if config["fabric"].get("num_nodes", 1) == 1:
        return True
    return all(os.environ.get(name, "0") == "0" for name in _RANKS)
