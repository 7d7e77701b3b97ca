"""An append-only log file of JSON lines, each of which contains the hash of the line before it."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import stat
import time
from pathlib import Path
from typing import Any

from lit_fedad.core.errors import UserError
from lit_fedad.core.files import given_bytes, unwritable_in_one_line

TIME = "%Y-%m-%dT%H:%M:%SZ"
"""Format of a line's time, which is in UTC."""

_FIRST_HASH = "0" * 64  # takes the place of the previous hash in the first line
_NO_FILE = (-1, -1, -1)  # the stamp of a file that does not exist
_MAX_BYTES = 1 << 31  # a log of requests takes years to grow so large


class ChainedLog:
    """A log in which changed, removed or inserted lines are noticed when it is read.

    Removed lines at the end are noticed only by a reader who has noted the last hash elsewhere.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        self._lines: list[dict[str, Any]] = []
        self._read_stamp = _NO_FILE  # stamp of the file when `_lines` were read or written
        self._complete_bytes = 0  # length of `_lines` in the file, without a line that a crash cut off

    def entries(self) -> list[dict[str, Any]]:
        """Returns all lines, oldest first, without a last line that a crash cut off.

        Raises:
            UserError: If a line was changed, or the file cannot be read.
        """
        try:
            if not self.file.exists() and not self.file.is_symlink():
                self._lines, self._read_stamp, self._complete_bytes = [], _NO_FILE, 0
                return self._lines
            status = self.file.lstat()
            if not stat.S_ISREG(status.st_mode):
                raise UserError(f"{self.file}: is no regular file; restore it from a copy")
            if _stamp(status) != self._read_stamp:
                content = given_bytes(self.file, _MAX_BYTES)
                self._lines, self._complete_bytes = self._checked(content), content.rfind(b"\n") + 1
                self._read_stamp = _stamp(status)
        except OSError as error:
            raise UserError(f"{self.file}: cannot be read ({error.strerror})") from error
        return self._lines

    def append(self, **content: Any) -> dict[str, Any]:
        """Appends a line and waits until it is on disk.

        Args:
            **content: Values of the line by name; number, time and hashes are added.

        Returns:
            The line as it was written.

        Raises:
            UserError: If an earlier line was changed, or the file cannot be written.
        """
        self.entries()  # refuses a pipe in place of the file, which would block when it is opened
        with unwritable_in_one_line(self.file):
            self.file.parent.mkdir(parents=True, exist_ok=True)
            handle = os.open(self.file, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_APPEND, 0o600)
            with os.fdopen(handle, "ab") as file:
                fcntl.flock(file, fcntl.LOCK_EX)  # two operators may approve at once
                earlier = self.entries()
                line: dict[str, Any] = {
                    "entry": len(earlier) + 1,
                    "time": time.strftime(TIME, time.gmtime()),
                    **content,
                }
                line["before"] = earlier[-1]["hash"] if earlier else _FIRST_HASH
                line["hash"] = _hash(line)
                if self._complete_bytes < os.fstat(file.fileno()).st_size:
                    file.truncate(self._complete_bytes)
                file.write(json.dumps(line).encode() + b"\n")
                file.flush()
                os.fsync(file.fileno())
                self._complete_bytes, self._read_stamp = file.tell(), _stamp(os.fstat(file.fileno()))
        earlier.append(line)
        return line

    def _checked(self, content: bytes) -> list[dict[str, Any]]:
        """Parses the complete lines of the file, and checks their numbers and hashes."""
        lines: list[dict[str, Any]] = []
        previous_hash = _FIRST_HASH
        for number, text in enumerate(content.split(b"\n")[:-1], start=1):
            try:
                line = json.loads(text)
                if line["entry"] != number or line["before"] != previous_hash or line["hash"] != _hash(line):
                    raise ValueError("does not follow")
            except (ValueError, LookupError, TypeError, RecursionError) as error:
                raise UserError(
                    f"{self.file}, line {number}: does not follow from the line before; the file was changed: restore"
                    " it from a copy"
                ) from error
            lines.append(line)
            previous_hash = line["hash"]
        return lines


def _stamp(status: os.stat_result) -> tuple[int, int, int]:
    """Returns values that change with every write, even if the writer sets the time of modification back."""
    return status.st_ino, status.st_size, status.st_ctime_ns


def _hash(line: dict[str, Any]) -> str:
    """Computes the SHA-256 of a line without its own hash."""
    text = json.dumps({name: value for name, value in line.items() if name != "hash"}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()
