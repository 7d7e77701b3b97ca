"""Seconds of a part of a process, as its last line; with torch alone, which every environment has."""

import json
import time
from collections.abc import Callable

import torch


def report(work: Callable[[], object]) -> None:
    """Runs a piece of work; prints the seconds of the processor and the clock, and the MB that it held on a GPU."""
    cpu, wall = time.process_time(), time.perf_counter()
    work()
    took = {"cpu": time.process_time() - cpu, "wall": time.perf_counter() - wall}
    print(json.dumps(took | {"gpu": torch.cuda.max_memory_allocated() / 1e6}))
