"""Long polls: the open port holds an empty answer back until the coordinator has given orders.

An order never waits in an answer that is held: a site asks again once it has the empty one. So none is lost with a site
that has gone without a word.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

HELD_S = 20.0
"""Longest time that an answer is held; Flower's client waits 30 seconds for one."""

_LOOK_S = 0.1


class Bell:
    """Tells the process of the open port that the process of the run has given orders.

    Args:
        path: A file that both can reach; it grows with each ring.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def ring(self) -> None:
        """Tells that there are orders."""
        with self.path.open("ab") as file:
            file.write(b".")

    @property
    def rings(self) -> int:
        """How often it has rung so far."""
        try:
            return self.path.stat().st_size
        except FileNotFoundError:
            return 0

    async def wait(self, heard: int, over: Callable[[], bool]) -> None:
        """Waits until it rings, `HELD_S` at most.

        Args:
            heard: Rings that were heard before: one more has come already, and is not waited for.
            over: Whether to wait no longer.
        """
        end = time.monotonic() + HELD_S
        while self.rings == heard and time.monotonic() < end and not over():
            await asyncio.sleep(_LOOK_S)
