"""The start of processes and of the machine, which distinguishes a process from a later one with the same number."""

from pathlib import Path

import psutil

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

_SAME_S = 0.5  # largest difference between two readings of one start time: that of the machine is imprecise


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
    return abs(start_time(pid) - since) <= _SAME_S


def boot_id() -> str:
    """Identifies the present start of the machine; setting the clock does not change it.

    Returns:
        The number that Linux draws at each start; an empty text on other systems.
    """
    return _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else ""
