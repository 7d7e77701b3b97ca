"""Fixed-size rows on disk, one a key, with checksums: damaged rows are found and computed again.

``rows.bin`` holds the rows one after the other, ``index.bin`` the key and a checksum of each, ``header.json``
their description. An index entry follows its row: a killed process loses no more than what it was writing.
"""

import json
import logging
import math
import shutil
import warnings
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock, Timeout

from lit_fedad.core.errors import UserError
from lit_fedad.core.files import atomic

Shapes = tuple[tuple[int, ...], ...]

_ENTRY = np.dtype([("key", "V32"), ("row_crc", "<u4"), ("crc", "<u4")])  # crc: of the entry's first 36 bytes
_FREE = bytes(_ENTRY.itemsize)  # the entry of a row that may be overwritten
_ELSEWHERE = "choose another folder (cache.folder=...) or compute features each time (cache.enabled=false)"

_logger = logging.getLogger(__name__)


class RowStore:
    """Store of rows of half-precision numbers with keys of 32 bytes.

    Every method works under `locked`. Damage gives one warning that names the file, and missing keys.

    Args:
        folder: Folder of the files; created when first needed.
        identity: Description of the rows, a JSON object; a store of another identity is emptied.

    Attributes:
        shapes: Shape of each layer in a row; None while the store is empty.
        row: Number of the row of each key.
    """

    def __init__(self, folder: Path, identity: dict[str, Any]) -> None:
        self.folder, self._identity = folder, identity
        self.rows_file, self._index_file = folder / "rows.bin", folder / "index.bin"
        self._header_file = folder / "header.json"
        self.shapes: Shapes | None = None
        self.row: dict[bytes, int] = {}
        self._crc: dict[int, int] = {}
        self._free: list[int] = []
        self._verified: set[tuple[int, int]] = set()

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Locks the store against other processes, and reads what they have written.

        Raises:
            UserError: If the disk refuses something in the meantime.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            lock = FileLock(self.folder / "lock")
            try:
                lock.acquire(timeout=1)
            except Timeout:
                _logger.warning("waiting for another process that fills the feature cache %s", self.folder)
                lock.acquire()
            try:
                self._open()
                yield
            finally:
                lock.release()
        except OSError as error:
            reason = error.strerror or type(error).__name__
            raise UserError(f"feature cache {self.folder} cannot be used ({reason}): {_ELSEWHERE}") from error

    def _open(self) -> None:
        self._forget()
        if not self._header_file.exists() and not self._index_file.exists():
            return
        try:
            header = json.loads(self._header_file.read_text())
            self.shapes = tuple(tuple(map(int, shape)) for shape in header.pop("shapes"))
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
            self.clear("is missing or damaged")
            return
        if header != self._identity:
            self.clear("belongs to another transform, backbone or version")
            return
        self._read_index()

    def _read_index(self) -> None:
        content = self._index_file.read_bytes() if self._index_file.exists() else b""
        count, torn = divmod(len(content), _ENTRY.itemsize)
        damaged = [count] if torn else []
        for number, entry in enumerate(np.frombuffer(content, _ENTRY, count)):
            raw = entry.tobytes()
            if raw == _FREE:
                self._free.append(number)
            elif zlib.crc32(raw[:-4]) == entry["crc"]:
                self.row[entry["key"].tobytes()] = number
                self._crc[number] = int(entry["row_crc"])
            else:
                damaged.append(number)
        if damaged:
            self._warn(self._index_file, f"has {len(damaged)} damaged entries, which are made again")
            self._free += damaged
            self._write_entries(dict.fromkeys(damaged, _FREE))

    def missing(self, keys: Iterable[bytes]) -> list[bytes]:
        """Returns the keys without a row, or with one that fails its checksum; a row is checked once a process."""
        absent, damaged = [], []
        size = self._row_bytes
        length = self.rows_file.stat().st_size // size if self.shapes and self.rows_file.exists() else 0
        rows = np.memmap(self.rows_file, np.uint8, "r", shape=(length, size)) if length else np.empty((0, 0))
        for key in keys:
            row = self.row.get(key)
            if row is None:
                absent.append(key)
            elif (row, self._crc[row]) not in self._verified:
                if row < length and zlib.crc32(rows[row]) == self._crc[row]:
                    self._verified.add((row, self._crc[row]))
                else:
                    damaged.append(key)
        if damaged:
            self._warn(self.rows_file, f"has {len(damaged)} damaged rows, which are made again")
        return damaged + absent

    def clear(self, reason: str) -> None:
        """Discards every row, with a warning that gives the reason."""
        self._warn(self._header_file, f"{reason}: everything is made again")
        for file in (self.rows_file, self._index_file, self._header_file):
            file.unlink(missing_ok=True)  # not emptied: another process may have it mapped
        self._verified.clear()
        self._forget()

    def prepare(self, shapes: Shapes, count: int) -> None:
        """Writes the header after a check that there is room for so many more rows.

        Raises:
            UserError: If there is too little room on the disk.
        """
        self.shapes = shapes
        needed = max(count - len(self._free), 0) * self._row_bytes
        room = shutil.disk_usage(self.folder).free
        if needed > room:
            sizes = f"{needed / 1e9:.3g} GB, the disk has {room / 1e9:.3g} GB left"
            raise UserError(f"feature cache {self.folder} needs {sizes}: {_ELSEWHERE}")
        write_json(self._header_file, {**self._identity, "shapes": shapes})

    def write(self, keys: Sequence[bytes], rows: np.ndarray) -> None:
        """Writes the rows of keys, float16 ``[B, row]``."""
        entries: dict[int, bytes] = {}
        self.rows_file.touch()
        with self.rows_file.open("r+b") as file:
            for key, values in zip(keys, rows, strict=True):
                number = self._place(key)
                file.seek(number * self._row_bytes)
                file.write(values.tobytes())
                self.row[key], self._crc[number] = number, zlib.crc32(values)
                start = key + self._crc[number].to_bytes(4, "little")
                entries[number] = start + zlib.crc32(start).to_bytes(4, "little")
        self._write_entries(entries)
        self._verified |= {(number, self._crc[number]) for number in entries}

    def _place(self, key: bytes) -> int:
        """The row for a key: its damaged one, a free one, or the next."""
        if key in self.row:
            return self.row[key]
        return self._free.pop() if self._free else len(self._crc)

    def _write_entries(self, entries: dict[int, bytes]) -> None:
        self._index_file.touch()
        with self._index_file.open("r+b") as file:
            for number, entry in entries.items():
                file.seek(number * _ENTRY.itemsize)
                file.write(entry)

    @property
    def _row_bytes(self) -> int:
        return np.dtype(np.float16).itemsize * sum(map(math.prod, self.shapes or ()))

    def _forget(self) -> None:
        self.shapes, self.row, self._crc, self._free = None, {}, {}, []

    def _warn(self, file: Path, what: str) -> None:
        warnings.warn(f"feature cache file {file} {what}", stacklevel=5)


def write_json(path: Path, content: Any) -> None:
    """Replaces a JSON file in one step."""
    with atomic(path) as partial:
        partial.write_text(json.dumps(content))
