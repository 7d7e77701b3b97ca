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


class Signals:
    """Tells the open port that the run has sent requests, and the run which sites were ended by their operators.

    Args:
        folder: The coordinator's folder.
    """

    def __init__(self, folder: Path) -> None:
        self._sent = folder / "requests.sent"  # grows with each request
        self._ended = folder / "signed_off"

    def clear(self) -> None:
        """Forgets what an earlier start left."""
        self._sent.unlink(missing_ok=True)
        for file in self._ended.glob("*"):
            file.unlink(missing_ok=True)

    def send(self, most: int) -> None:
        """Tells that there are requests, whose replies have so many bytes at most."""
        with self._sent.open("ab") as file:
            file.write(f"{most:0{_DIGITS}d}".encode())

    @property
    def longest(self) -> int:
        """Most bytes of a reply to the last requests; 0 before the first."""
        try:
            return int(self._sent.read_bytes()[-_DIGITS:] or b"0")
        except FileNotFoundError:
            return 0

    @property
    def count(self) -> int:
        """A number that grows whenever requests are sent."""
        try:
            return self._sent.stat().st_size
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

    def sign_off(self, key: bytes) -> None:
        """Notes that the site of a key signs off."""
        self._ended.mkdir(exist_ok=True)
        self._of(key).touch()

    def sign_on(self, key: bytes) -> None:
        """Notes that the site of a key is back."""
        self._of(key).unlink(missing_ok=True)

    def gone(self, key: bytes) -> bool:
        """Tells whether the site of a key has signed off, and is not waited for any more."""
        try:
            return time.time() - self._of(key).stat().st_mtime > GRACE_S
        except FileNotFoundError:
            return False

    def _of(self, key: bytes) -> Path:
        return self._ended / hashlib.sha256(b"".join(key.split())).hexdigest()[:32]
