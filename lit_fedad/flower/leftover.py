"""Processes that go on when a coordinator is killed: Flower's SuperLink, and the run that the SuperLink started.

They are in process sessions of their own, so they outlive the coordinator, and keep the port and the run occupied.
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

import psutil

from lit_fedad.core.errors import UserError
from lit_fedad.core.files import atomic, stored_text
from lit_fedad.core.plain_values import plain_json
from lit_fedad.flower.process_identity import boot_id, is_same, start_time

MARK = "LIT_FEDAD_COORDINATOR"
"""Environment variable that holds the coordinator's folder; all processes that a coordinator starts inherit it."""

_FILE = "superlink.json"
_GRACE_S = 10  # seconds for a process to end after a signal


def remember(folder: Path, pid: int) -> None:
    """Writes down the first process of a session that was just started, for `end_leftover`."""
    leader = {"pid": pid, "began": start_time(pid), "booted": boot_id()}
    with atomic(folder / _FILE) as partial:
        partial.write_text(json.dumps(leader))


def end_leftover(folder: Path) -> bool:
    """Ends the processes left of the session that `remember` wrote down, and those with the folder's `MARK`.

    Returns:
        Whether there were any.

    Raises:
        UserError: If the file cannot be read.
    """
    leftover = _left(_leader(folder / _FILE), folder)
    for process in leftover:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.terminate()
    _, alive = psutil.wait_procs(leftover, _GRACE_S)
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(alive, _GRACE_S)
    (folder / _FILE).unlink(missing_ok=True)
    return bool(leftover)


def _leader(path: Path) -> int | None:
    """Reads the number of the process that `remember` wrote down; None if there is no such process any more."""
    if not path.exists():
        return None
    try:
        leader = plain_json(stored_text(path))
        pid, began_at, booted = int(leader["pid"]), float(leader["began"]), leader["booted"]
        if not 0 < pid < 1 << 31:
            raise ValueError("no number of a process")
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise UserError(f"{path}: cannot be read; end Flower's SuperLink yourself, and remove it") from error
    if booted != boot_id():
        return None
    with contextlib.suppress(psutil.NoSuchProcess):
        if not is_same(pid, began_at):  # another process has got its number since
            return None
    return pid


def _left(leader: int | None, folder: Path) -> list[psutil.Process]:
    """Lists the running processes of a leader's session, those with the folder's `MARK`, and the children of both.

    The session is found even if its first process has ended: the system reuses its number only once the whole session
    has ended. Processes in sessions of their own, such as Flower's ServerApp, are then known by their `MARK`, and so is
    a SuperLink whose coordinator was ended before it could write down its number.
    """
    processes: set[psutil.Process] = set()
    for process in psutil.process_iter():
        try:
            in_session = leader is not None and os.getsid(process.pid) == leader
            if in_session or process.environ().get(MARK) == str(folder):
                processes |= {process, *process.children(recursive=True)}
        except (OSError, psutil.Error):
            continue
    return [process for process in processes if _is_running(process)]


def _is_running(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False
