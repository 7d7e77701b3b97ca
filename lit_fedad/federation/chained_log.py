"""A file that only grows: JSON lines, each with the hash of the one before."""

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
from lit_fedad.core.files import given_bytes, told_unwritable

TIME = "%Y-%m-%dT%H:%M:%SZ"
"""How the time of a line is written; in UTC."""

_BEGIN = "0" * 64
_GONE = (-1, -1, -1)
_LARGEST = 1 << 31  # bytes: years of requests


class ChainedLog:
    """A log whose lines cannot be changed, taken out or put in without notice.

    Lines that are taken away at the end are missed by who wrote down the last hash.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        self._lines: list[dict[str, Any]] = []
        self._seen = _GONE  # the file as it was when these lines were read or written
        self._whole = 0  # bytes of these lines, without what a crash cut off

    def entries(self) -> list[dict[str, Any]]:
        """Returns all lines, oldest first; a line that a crash cut off is none.

        Raises:
            UserError: If a line was changed, or the file cannot be read.
        """
        try:
            if not self.file.exists() and not self.file.is_symlink():
                self._lines, self._seen, self._whole = [], _GONE, 0
                return self._lines
            found = self.file.lstat()
            if not stat.S_ISREG(found.st_mode):
                raise UserError(f"{self.file}: is no regular file; restore it from a copy")
            if _mark(found) != self._seen:
                content = given_bytes(self.file, _LARGEST)
                self._lines, self._whole = self._checked(content), content.rfind(b"\n") + 1
                self._seen = _mark(found)
        except OSError as error:
            raise UserError(f"{self.file}: cannot be read ({error.strerror})") from error
        return self._lines

    def append(self, **content: Any) -> dict[str, Any]:
        """Writes a line; it is on disk when this returns.

        Raises:
            UserError: If an earlier line was changed, or nothing can be written.
        """
        self.entries()  # a pipe in the place of the file would not open
        with told_unwritable(self.file):
            self.file.parent.mkdir(parents=True, exist_ok=True)
            handle = os.open(self.file, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_APPEND, 0o600)
            with os.fdopen(handle, "ab") as file:
                fcntl.flock(file, fcntl.LOCK_EX)  # two operators may approve at once
                before = self.entries()
                line: dict[str, Any] = {
                    "entry": len(before) + 1,
                    "time": time.strftime(TIME, time.gmtime()),
                    **content,
                }
                line["before"] = before[-1]["hash"] if before else _BEGIN
                line["hash"] = _hash(line)
                if self._whole < os.fstat(file.fileno()).st_size:
                    file.truncate(self._whole)
                file.write(json.dumps(line).encode() + b"\n")
                file.flush()
                os.fsync(file.fileno())
                self._whole, self._seen = file.tell(), _mark(os.fstat(file.fileno()))
        before.append(line)
        return line

    def _checked(self, content: bytes) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        before = _BEGIN
        for number, text in enumerate(content.split(b"\n")[:-1], start=1):
            try:
                line = json.loads(text)
                if line["entry"] != number or line["before"] != before or line["hash"] != _hash(line):
                    raise ValueError("does not follow")
            except (ValueError, LookupError, TypeError, RecursionError) as error:
                raise UserError(
                    f"{self.file}, line {number}: does not follow from the line before; the file was changed: restore"
                    " it from a copy"
                ) from error
            found.append(line)
            before = line["hash"]
        return found


def _mark(found: os.stat_result) -> tuple[int, int, int]:
    """Returns what differs once a file was written to, whatever time its writer gives it."""
    return found.st_ino, found.st_size, found.st_ctime_ns


def _hash(line: dict[str, Any]) -> str:
    text = json.dumps({name: value for name, value in line.items() if name != "hash"}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()
