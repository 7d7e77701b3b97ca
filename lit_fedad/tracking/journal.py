"""The journal of a run: an append-only file of records, which is both queue and memory."""

import contextlib
import json
import math
import os
import re
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from lit_fedad.core.errors import UserError
from lit_fedad.core.files import check_stored
from lit_fedad.core.text import redact

Record = dict[str, Any]
"""One line of a journal: ``{"kind", "scope", "values", "time"}``, its time in milliseconds."""

MAX_ITEMS = {"metrics": 1000, "params": 100, "tags": 100}
"""Number of values that one MLflow request takes, by the kind of record, so that one record is one request."""

REJECTED = "rejected.jsonl"
"""File of the records that a server has refused, beside the journal."""

_MAX_NAME = 250
_LARGEST = 1 << 30  # bytes of a journal
_MAX_TEXT = 6000
_MAX_DIGEST = 36


def metric_values(values: Mapping[str, float]) -> dict[str, float]:
    """Returns metrics under names that MLflow accepts, without values that are not finite.

    Example:
        >>> metric_values({"pixel_auroc@0.3": 0.25, "loss": math.nan})
        {'pixel_auroc_0.3': 0.25}
    """
    return {_name(name): float(value) for name, value in values.items() if math.isfinite(value)}


def text_values(values: Mapping[str, object]) -> dict[str, str]:
    """Returns parameters or tags as texts of 6,000 characters at most, without passwords, under names MLflow accepts.

    Example:
        >>> text_values({"federation.lr": 1e-3, "layers": ["a", "b"]})
        {'federation.lr': '0.001', 'layers': "['a', 'b']"}
    """
    return {_name(name): _text(value) for name, value in values.items()}


def artifact_values(path: Path, folder: Path) -> dict[str, str]:
    """Returns the name of a file or directory with a fingerprint of its current state.

    Returns:
        One item: the name, and number, total bytes and latest change of the files.
    """
    path, folder = path.resolve(), folder.resolve()
    name = path.relative_to(folder).as_posix() if path.is_relative_to(folder) else str(path)
    files = [path, *path.rglob("*")] if path.is_dir() else [path]
    stats = [file.stat() for file in files if file.is_file()]
    size, latest = sum(stat.st_size for stat in stats), max((stat.st_mtime_ns for stat in stats), default=0)
    return {name: f"{len(stats)} files, {size} bytes, {latest}"}


def dataset_values(
    name: str, source: str, digest: str, profile: Mapping[str, object]
) -> dict[str, dict[str, str]]:
    """Returns a data set's description by its name."""
    profile_text = json.dumps(profile, default=str)
    return {name: {"source": redact(source), "digest": digest[:_MAX_DIGEST], "profile": profile_text}}


def _name(text: str) -> str:
    """Replaces what MLflow does not allow in a name: characters, and parts that would be other folders as a path.

    Example:
        >>> _name("products/i_auroc/.."), _name("a//b=1")
        ('products/i_auroc/_', 'a/_/b_1')
    """
    name = re.sub(r"[^\w.\-/ ]", "_", text)[:_MAX_NAME]
    return re.sub(r"(^|/)(\.+|(?=/|$))", r"\1_", name)


def _text(value: object) -> str:
    text = redact(str(value))
    return text if len(text) <= _MAX_TEXT else text[: _MAX_TEXT - 1] + "…"


def tracking_folder(folder: Path) -> Path:
    """Returns the subfolder of a run's folder that holds the files of its tracking."""
    return folder / "tracking"


def journal_file(folder: Path) -> Path:
    """Returns the path of the journal in a run's folder."""
    return tracking_folder(folder) / "journal.jsonl"


def check_journal(folder: Path) -> None:
    """Checks that the journal of a folder and what servers refused of it, if there are any, are files of that folder.

    Raises:
        UserError: If it is a link, pipe or device, too long to be read, or its folder is a link.
    """
    path = journal_file(folder)
    if path.parent.is_symlink():
        raise UserError(f"{path.parent}: is a link, and no folder of this run")
    for own in (path, path.with_name(REJECTED)):
        if own.exists() or own.is_symlink():
            check_stored(own)
            if (size := own.stat().st_size) > _LARGEST:
                raise UserError(f"{own}: has {size} bytes, more than any file of its kind; remove it")


def complete_lines(file: BinaryIO) -> Iterator[bytes]:
    """Yields the lines from the file's position on; stops and stays before a last line without its end."""
    while (line := file.readline()).endswith(b"\n"):
        yield line
    file.seek(-len(line), os.SEEK_CUR)


class Journal:
    """The append-only file of one run's records, and an index of what it holds.

    A journal that lies in the run's folder is continued. The values of a record are named. A name is known within its
    kind and scope (the step of metrics, the folder of an artifact, the context of a data set).
    """

    def __init__(self, folder: Path) -> None:
        path = journal_file(folder)
        path.parent.mkdir(parents=True, exist_ok=True)
        check_journal(folder)
        self._file = path.open("ab+")
        self._known: dict[tuple[str, str | int | None, str], Any] = {}
        self._file.seek(0)
        for line in complete_lines(self._file):
            # A damaged line is reported by the sender.
            with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError, RecursionError):
                self._remember(json.loads(line))
        # A killed process can leave half a line behind.
        self._file.truncate()

    def append_new(self, kind: str, values: Mapping[str, Any], scope: str | int | None) -> bool:
        """Appends those values that the journal does not hold yet.

        A metric or parameter that is known keeps its value; others are appended again if their value changed.
        """
        # MLflow would draw a second value of a metric at its step, and refuse that of a parameter.
        once = kind in ("metrics", "params")
        new = [
            (name, value)
            for name, value in values.items()
            if (kind, scope, name) not in self._known
            or (not once and self._known[kind, scope, name] != value)
        ]
        size = MAX_ITEMS.get(kind, 1)
        for start in range(0, len(new), size):
            self.append(kind, dict(new[start : start + size]), scope)
        return bool(new)

    def append(self, kind: str, values: Mapping[str, Any], scope: str | int | None = None) -> None:
        """Appends one record with the current time, and returns when it is on the disk."""
        record = {"kind": kind, "scope": scope, "values": values, "time": time.time_ns() // 1_000_000}
        self._remember(record)
        self._file.write(json.dumps(record).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def _remember(self, record: Record) -> None:
        for name, value in record["values"].items():
            self._known[record["kind"], record["scope"], name] = value
