"""What a coordinator leaves running where it is killed: Flower's SuperLink, and the run that this started.

They are processes of sessions of their own, which go on without who began them, and hold port and run.
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
from lit_fedad.core.processes import began, is_same

MARK = "LIT_FEDAD_COORDINATOR"
"""Variable in the environment of all that a coordinator starts, and of what that starts: the coordinator's folder."""

_FILE = "superlink.json"
_GRACE_S = 10
_CLOCK_S = 60.0
"""How far a clock that is set moves the time at which the machine was started."""


def remember(folder: Path, pid: int) -> None:
    """Writes down the first process of a session that was just started."""
    noted = {"pid": pid, "began": began(pid), "booted": psutil.boot_time()}
    with atomic(folder / _FILE) as partial:
        partial.write_text(json.dumps(noted))


def end_leftover(folder: Path) -> bool:
    """Ends what is left of the session that `remember` wrote down, and processes with the folder's `MARK`.

    Returns:
        Whether any were.

    Raises:
        UserError: If the file cannot be read.
    """
    path = folder / _FILE
    if not path.exists():
        return False
    try:
        noted = plain_json(stored_text(path))
        pid, since, booted = int(noted["pid"]), float(noted["began"]), float(noted["booted"])
        if not 0 < pid < 1 << 31:
            raise ValueError("no number of a process")
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise UserError(f"{path}: cannot be read; end Flower's SuperLink yourself, and remove it") from error
    restarted = abs(psutil.boot_time() - booted) > _CLOCK_S
    left = [] if restarted else _session(pid, since, folder)
    for process in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.terminate()
    _, alive = psutil.wait_procs(left, _GRACE_S)
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(alive, _GRACE_S)
    path.unlink()
    return bool(left)


def _session(pid: int, since: float, folder: Path) -> list[psutil.Process]:
    """Lists the processes of a session, and those in sessions of their own that they have started.

    Also where the first has ended: until all of the session have, nobody gets its number. What is in another session
    then, as Flower's ServerApp, is known by its `MARK`.
    """
    another = False
    with contextlib.suppress(psutil.NoSuchProcess):
        another = not is_same(pid, since)
    found: set[psutil.Process] = set()
    for process in psutil.process_iter():
        try:
            own = os.getsid(process.pid) == pid and not another
            if own or process.environ().get(MARK) == str(folder):
                found |= {process, *process.children(recursive=True)}
        except (OSError, psutil.Error):
            continue
    return [process for process in found if _lives(process)]


def _lives(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False
