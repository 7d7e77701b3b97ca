"""Seconds of a part of a process, as its last line; without imports, so that every environment can run it."""

import json
import time
from collections.abc import Callable


def report(work: Callable[[], object]) -> None:
    """Runs a piece of work, and prints the seconds of the processor and of the clock that it took."""
    cpu, wall = time.process_time(), time.perf_counter()
    work()
    print(json.dumps({"cpu": time.process_time() - cpu, "wall": time.perf_counter() - wall}))
