"""The start time of processes, which distinguishes a process from a later one with the same number."""

import psutil

SAME_S = 0.5
"""Largest difference in seconds between two readings of the same start time: that of the machine is imprecise."""


def start_time(pid: int) -> float:
    """Returns the seconds from the start of the machine to that of a process; setting the clock does not change them.

    Args:
        pid: Number of the process.

    Raises:
        psutil.NoSuchProcess: If there is no process of this number.
    """
    return float(psutil.Process(pid).create_time() - psutil.boot_time())


def is_same(pid: int, since: float) -> bool:
    """Returns whether a process started at a time that `start_time` returned earlier.

    Raises:
        psutil.NoSuchProcess: If there is no process of this number.
    """
    return abs(start_time(pid) - since) <= SAME_S
