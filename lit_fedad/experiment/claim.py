"""Claims on a run's folder: only one command at a time writes to it, and files that no run wrote are kept."""

from __future__ import annotations

import logging
import os
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from lit_fedad.core.config import Config
from lit_fedad.core.errors import ANEW, UserError
from lit_fedad.core.files import absent, removed_on_failure
from lit_fedad.core.identity import identity, judgement
from lit_fedad.experiment.run_files import (
    FILES,
    FOLDERS,
    MANIFEST,
    check_folders,
    plain,
    read_manifest,
    read_settings,
    read_yaml,
    refused_if_malformed,
    write_settings,
)
from lit_fedad.experiment.run_folder import RunFolder
from lit_fedad.privacy.image_privacy import KEY_FILE

LOCK = ".lock"

ELSEWHERE = "give out=DIR, a folder that this account may write to"
"""Advice of commands that write to a folder inside a run's folder, if the run belongs to another account."""

_logger = logging.getLogger(__name__)

# Environment variables of processes that a launcher or the first process has started.
_RANKS = ("RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "SLURM_PROCID")


@contextmanager
def locked(folder: Path, patience: float = 0.0, advice: str = "") -> Iterator[None]:
    """Holds a folder's lock for a block; if the process is killed, the system releases the lock.

    Args:
        folder: The folder.
        patience: How long to wait for another process that holds the lock, in seconds; a warning says so.
        advice: What the user can do if the folder cannot be written.

    Raises:
        UserError: If another process holds the lock, or the folder cannot be written.
    """
    lock = FileLock(folder / LOCK)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            if patience:
                _logger.warning(
                    "waiting %g s at most for another lit-fedad command at work in %s", patience, folder
                )
            lock.acquire(timeout=patience)
    except Timeout:
        raise UserError(
            f"{folder}: another lit-fedad command is at work in this folder; wait for its end, or end it, or give"
            " another folder"
        ) from None
    except NotImplementedError:
        warnings.warn(f"{folder}: its file system has no locks; start no second command on it", stacklevel=3)
    except OSError as error:
        problem = f"{error.filename or folder}: cannot be written ({error.strerror})"
        raise UserError("; ".join(filter(None, (problem, advice)))) from error
    try:
        yield
    finally:
        lock.release()


def launches(config: Config) -> bool:
    """Returns whether this process is the one that the user started; it locks the folder for all other processes.

    On one machine the other processes are started by Fabric and never reach this function. On several machines, or
    under a launcher, each process runs the whole command.
    """
    if config["fabric"].get("num_nodes", 1) == 1:
        return True
    return all(os.environ.get(name, "0") == "0" for name in _RANKS)


@contextmanager
def begun(folder: Path, config: Config) -> Iterator[None]:
    """Holds the folder for a block that begins or continues a run; a refused command leaves no files behind.

    With ``fresh`` the earlier run is not deleted here, but by `claim_anew`.

    Raises:
        UserError: As in `locked` and `claim`, or if a folder in it is a link.
    """
    check_folders(folder)
    before, made = _present(folder), absent(folder / LOCK)
    with locked(folder), removed_on_failure(made, unless=folder / "config.yaml"):
        try:
            if before and config["fresh"]:
                _check_own(folder)
            else:
                claim(folder, config)
            for left_over in folder.glob("figures/.*.partial"):  # by a run that was killed while it drew
                with suppress(OSError):
                    left_over.unlink()
            yield
        except BaseException:
            if not before and {*_present(folder)} <= {"config.yaml", MANIFEST}:
                clear(folder)
            raise


def claim_anew(folder: Path, config: Config) -> None:
    """Deletes the earlier run in a folder that `begun` holds, once the new run is built and can begin.

    Raises:
        UserError: As in `clear` and `claim`.
    """
    clear(folder)
    claim(folder, config)


def clear(folder: Path) -> None:
    """Removes the files of an earlier run, and no other files in the folder.

    Raises:
        UserError: If the folder holds such files, but no run.
    """
    _check_own(folder)
    for name in FOLDERS:
        shutil.rmtree(folder / name, ignore_errors=True)
    for name in (*(f".{name}.partial" for name in FILES), *FILES, KEY_FILE):
        with suppress(FileNotFoundError, NotADirectoryError):
            (folder / name).unlink()


def claim(folder: Path, config: Config) -> None:
    """Reserves the folder for a configuration, and writes the configuration to it.

    Raises:
        UserError: If the folder cannot be written, or holds files that no run wrote, a run of another configuration or
            version, or a complete run without checkpoints that would have to be judged by other keys.
    """
    if (folder / "config.yaml").exists():
        with refused_if_malformed(str(folder / "config.yaml")):
            made = identity(read_settings(folder))
        if made != identity(config):
            if RunFolder(folder).result() or any((folder / "checkpoints").glob("round_*")):
                raise _occupied(folder)
            clear(folder)  # left by a command that failed before its first round
    elif (present := _present(folder)) and not _holds_run(folder):
        raise UserError(
            f"{folder}: holds {present[0]}, which no run of lit-fedad wrote; give another out=DIR"
        )
    if (result := RunFolder(folder).result()) is not None:
        with refused_if_malformed(str(folder / "result.json")):
            _check_result(folder, result, plain(config))
    write_settings(folder, config)


def _check_result(folder: Path, result: Mapping[str, Any], config: Config) -> None:
    """Refuses a complete run of another configuration, or one that can no longer be judged by other keys."""
    made = result.get("config", {})
    if identity(made) != identity(config):
        raise _occupied(folder)
    # A folder with a site's own detector has no checkpoints: decisions are judged in the federation's run.
    trained = "own_client" in result or any((folder / "checkpoints").glob("round_*"))
    if not trained and judgement(made) != judgement(config):
        raise UserError(
            f"{folder / 'checkpoints'}: holds no checkpoint, by which a complete run is judged by other keys of"
            f" evaluation; restore it from a copy, give the keys that the run has, or {ANEW}"
        )


def _present(folder: Path) -> list[str]:
    """Lists the files and folders in a folder that have names of a run's files and folders."""
    return [name for name in (*FOLDERS, *FILES) if (folder / name).exists()]


def _check_own(folder: Path) -> None:
    """Refuses a folder that holds such files or folders, but no run."""
    if (present := _present(folder)) and not _holds_run(folder):
        raise UserError(
            f"{folder}: holds {present[0]}, but no run of lit-fedad; fresh=true deletes only what a run wrote."
            " Give another out=DIR"
        )


def _holds_run(folder: Path) -> bool:
    """Returns whether a run wrote to the folder; its files may be damaged."""
    with suppress(UserError):
        if read_manifest(folder) is not None:
            return True
    with suppress(UserError):
        config = read_yaml(folder / "config.yaml")[1]
        return isinstance(config, dict) and {"method", "task", "data", "partition", "seed"} <= config.keys()
    return False


def _occupied(folder: Path) -> UserError:
    """Builds the error for a folder that holds a run of another configuration."""
    return UserError(f"{folder}: holds a run of another configuration; {ANEW}")
