"""What the process of the open port and that of the run tell each other, by files that both can reach."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable
from pathlib import Path

HELD_S = 20.0
"""Longest time that an answer is held; Flower's client waits 30 seconds for one."""

_LOOK_S, _DIGITS = 0.1, 16

GRACE_S = 30.0
"""How long a site that has signed off is waited for: it may be started again."""


class RequestSignal:
    """Tells the open port that the run has sent requests, and how long replies may be.

    Args:
        path: A file; it grows with each request.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def send(self, most: int) -> None:
        """Tells that there are requests, whose replies have so many bytes at most."""
        with self.path.open("ab") as file:
            file.write(f"{most:0{_DIGITS}d}".encode())

    @property
    def longest(self) -> int:
        """Most bytes of a reply to the last requests; 0 before the first."""
        try:
            return int(self.path.read_bytes()[-_DIGITS:] or b"0")
        except FileNotFoundError:
            return 0

    @property
    def count(self) -> int:
        """A number that grows whenever requests are sent."""
        try:
            return self.path.stat().st_size
        except FileNotFoundError:
            return 0

    async def wait(self, seen: int, over: Callable[[], bool]) -> None:
        """Waits until requests are sent, `HELD_S` at most.

        Args:
            seen: The `count` that is known: where there is more already, nothing is waited for.
            over: Whether to wait no longer.
        """
        end = time.monotonic() + HELD_S
        while self.count == seen and time.monotonic() < end and not over():
            await asyncio.sleep(_LOOK_S)


class SignOffs:
    """Tells the run which sites were ended by their operators: nobody waits for them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def note(self, key: bytes) -> None:
        """Notes that the site of a key signs off."""
        self.folder.mkdir(exist_ok=True)
        self._file(key).touch()

    def forget(self, key: bytes) -> None:
        """Notes that the site of a key is back."""
        self._file(key).unlink(missing_ok=True)

    def clear(self) -> None:
        """Forgets all."""
        for file in self.folder.glob("*"):
            file.unlink(missing_ok=True)

    def gone(self, key: bytes) -> bool:
        """Tells whether the site of a key has signed off, and is not waited for any more."""
        try:
            return time.time() - self._file(key).stat().st_mtime > GRACE_S
        except FileNotFoundError:
            return False

    def _file(self, key: bytes) -> Path:
        return self.folder / hashlib.sha256(b"".join(key.split())).hexdigest()[:32]
