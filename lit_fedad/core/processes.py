"""When a process began, which tells it from another that gets its number later."""

import psutil

SAME_S = 0.5
"""How far two readings of the same beginning may lie apart, in seconds: the machine's start is known to a second."""


def began(pid: int) -> float:
    """Returns the seconds from the machine's start to a process's, which no setting of the clock changes.

    Args:
        pid: Number of the process.

    Raises:
        psutil.NoSuchProcess: If there is none of this number.
    """
    return float(psutil.Process(pid).create_time() - psutil.boot_time())


def is_same(pid: int, since: float) -> bool:
    """Tells whether a process began at a time that `began` returned.

    Raises:
        psutil.NoSuchProcess: If there is none of this number.
    """
    return abs(began(pid) - since) <= SAME_S
