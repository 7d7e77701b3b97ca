"""Signals between the process of the open port and the process of the run, by files that both can reach."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable
from pathlib import Path

from lit_fedad.core.files import atomic

HELD_S = 20.0
"""Longest time that the open port holds back the answer to a poll; Flower's client waits 30 seconds for one."""

_LOOK_S, _DIGITS = 0.1, 16  # time between two looks at the file of sent requests; digits of each number in it

GRACE_S = 30.0
"""How long the run waits for a site that has signed off: its operator may start it again."""


class Signals:
    """Tells the open port that the run has sent requests, and the run which sites their operators have ended.

    Args:
        folder: The coordinator's folder.
    """

    def __init__(self, folder: Path) -> None:
        self._sent = folder / "requests.sent"  # has `_DIGITS` bytes for each time that requests were sent
        self._ended = folder / "signed_off"

    def clear(self) -> None:
        """Removes the files that an earlier start left."""
        self._sent.unlink(missing_ok=True)
        for file in self._ended.glob("*"):
            file.unlink(missing_ok=True)

    def send(self, max_bytes: int) -> None:
        """Tells the open port that requests were sent, and how many bytes a reply to them has at most."""
        with self._sent.open("ab") as file:
            file.write(f"{max_bytes:0{_DIGITS}d}".encode())

    @property
    def longest(self) -> int:
        """Most bytes of a reply to the requests that were sent last; 0 before the first."""
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

    async def wait(self, seen_count: int, stopping: Callable[[], bool]) -> None:
        """Waits until requests are sent, `HELD_S` at most.

        Args:
            seen_count: The `count` that the caller knows. If it has grown since, this returns at once.
            stopping: Returns whether the open port is shutting down, which ends the wait.
        """
        deadline = time.monotonic() + HELD_S
        while self.count == seen_count and time.monotonic() < deadline and not stopping():
            await asyncio.sleep(_LOOK_S)

    def sign_off(self, key: bytes) -> None:
        """Notes that the site with this public key signs off."""
        # The time since the machine has started, which is the same in all its processes whatever its clock is set to.
        with atomic(self._file_of(key)) as partial:
            partial.write_text(str(time.monotonic()))

    def sign_on(self, key: bytes) -> None:
        """Notes that the site with this public key is back."""
        self._file_of(key).unlink(missing_ok=True)

    def gone(self, key: bytes) -> bool:
        """Tells whether the site with this public key signed off more than `GRACE_S` ago and is not back."""
        try:
            return time.monotonic() - float(self._file_of(key).read_text()) > GRACE_S
        except FileNotFoundError:
            return False

    def _file_of(self, key: bytes) -> Path:
        """Returns the file that is there while a site is signed off; spaces in its key do not matter."""
        return self._ended / hashlib.sha256(b"".join(key.split())).hexdigest()[:32]
