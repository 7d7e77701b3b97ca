"""The deadline of a client's turn."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from lit_fedad.errors import UserError

GRACE_S = 5.0
"""Seconds that a turn has to stop at its deadline before its process is ended."""


@contextmanager
def deadline(seconds: float | None, who: str) -> Iterator[None]:
    """Limits the time of a block.

    A block that runs Python code, sleeps or waits for a file is interrupted. A block that hangs in compiled code cannot
    be: its process is ended, and with it the run, which continues from its last checkpoint when it is started again.

    Args:
        seconds: Wall-clock time; None for no limit.
        who: Whose turn it is, such as ``"client 3"``.

    Raises:
        UserError: In the block, at the deadline; or at once, where there are no alarms (outside the main thread, on
            Windows).
    """
    if seconds is None:
        yield
        return
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        raise UserError(
            "federation.sampler.deadline needs the alarms of a process's main thread; leave it null here"
        )

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise UserError(f"took longer than federation.sampler.deadline={seconds:g} seconds")

    last_resort = threading.Timer(seconds + GRACE_S, _end_process, (who, seconds))
    last_resort.daemon = True
    previous = signal.signal(signal.SIGALRM, interrupt)
    last_resort.start()
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
        last_resort.cancel()


def _end_process(who: str, seconds: float) -> None:
    late = f"{who} hangs beyond federation.sampler.deadline={seconds:g} seconds"
    sys.stderr.write(f"error: {late} and cannot be interrupted: its process ends\n")
    sys.stderr.flush()
    os._exit(2)
