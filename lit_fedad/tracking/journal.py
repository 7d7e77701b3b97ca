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
from lit_fedad.core.plain_values import plain_json
from lit_fedad.core.text import redact

Record = dict[str, Any]
"""One line of a journal: ``{"kind", "scope", "values", "time"}``, with the time in milliseconds since 1970."""

MAX_ITEMS = {"metrics": 1000, "params": 100, "tags": 100}
"""Most values in a record, by its kind: as many as one MLflow request takes, so that one record is one request."""

REJECTED = "rejected.jsonl"
"""File with the records that a server has refused, in the journal's folder."""

_MAX_NAME = 250  # characters of a name
_LARGEST = 1 << 30  # bytes of a journal
_LONGEST = 1 << 24  # bytes of a record
_MAX_TEXT = 6000  # characters of a parameter or tag
_MAX_DIGEST = 36  # characters of a data set's digest
# Type of a record's values, by its kind; and names that a record must have.
_TYPES = {
    **dict.fromkeys(("start", "params", "tags", "artifact", "end"), str),
    "metrics": int | float,
    "dataset": dict,
}
_NEEDED = {"start": {"experiment", "run_name", "journal"}, "end": {"status"}}


def metric_values(values: Mapping[str, float]) -> dict[str, float]:
    """Returns metrics under names that MLflow accepts, without values that are not finite.

    Example:
        >>> metric_values({"pixel_auroc@0.3": 0.25, "loss": math.nan})
        {'pixel_auroc_0.3': 0.25}
    """
    return {_name(name): float(value) for name, value in values.items() if math.isfinite(value)}


def text_values(values: Mapping[str, object]) -> dict[str, str]:
    """Returns parameters or tags as texts of at most 6,000 characters, without passwords, under names MLflow accepts.

    Example:
        >>> text_values({"federation.lr": 1e-3, "layers": ["a", "b"]})
        {'federation.lr': '0.001', 'layers': "['a', 'b']"}
    """
    return {_name(name): _text(value) for name, value in values.items()}


def artifact_values(path: Path, folder: Path) -> dict[str, str]:
    """Returns the name of a file or directory with a fingerprint of its current state.

    Returns:
        One item: the name (relative to the run's folder, if the path lies in it), and as its value the number, total
        bytes and latest change of the files.
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
    """Replaces by ``_`` what MLflow does not allow in a name: some characters, and empty parts or parts of dots.

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
    """Checks that the journal of a run's folder and the file of refused records, if they exist, lie in that folder.

    Raises:
        UserError: If one is a link, pipe or device or too long to be read, or if the folder ``tracking`` is a link.
    """
    path = journal_file(folder)
    if path.parent.is_symlink():
        raise UserError(f"{path.parent}: is a link, and no folder of this run")
    for file in (path, path.with_name(REJECTED)):
        if file.exists() or file.is_symlink():
            check_stored(file)
            if (size := file.stat().st_size) > _LARGEST:
                raise UserError(f"{file}: has {size} bytes, more than any file of its kind; remove it")


def complete_lines(file: BinaryIO) -> Iterator[bytes]:
    """Yields the lines from the file's position on; stops before a last line without an end, and leaves it unread."""
    while (line := file.readline()).endswith(b"\n"):
        yield line
    file.seek(-len(line), os.SEEK_CUR)


def read_record(line: bytes) -> Record:
    """Reads one line of a journal, which may come from anybody.

    Raises:
        ValueError: If it is no record.
    """
    if len(line) > _LONGEST:
        raise ValueError(f"it has {len(line)} bytes, more than any record")
    record = plain_json(line)
    if not (
        isinstance(record, dict)
        and isinstance(kind := record.get("kind"), str)
        and kind in _TYPES
        and isinstance(record.get("scope", 0), str | int | None)
        and isinstance(record.get("time"), int)
        and isinstance(values := record.get("values"), dict)
        and all(isinstance(value, _TYPES[kind]) for value in values.values())
        and _NEEDED.get(kind, set()) <= values.keys()
    ):
        raise ValueError("it does not hold what a run writes")
    return record


def read_start(file: BinaryIO) -> Record:
    """Reads the first line of a journal, the record by which the server knows the run.

    Raises:
        UserError: If it is another record, or none.
    """
    try:
        start = read_record(file.readline())
        if start["kind"] != "start" or not re.fullmatch("[0-9a-f]{32}", start["values"]["journal"]):
            raise ValueError("it does not begin a run")
    except ValueError as error:
        raise UserError(
            f"{file.name}: its first line cannot be read ({error}); restore it from a copy, or move the folder"
            f" {Path(file.name).parent} away, and the run's command begins a new record"
        ) from error
    return start


class Journal:
    """The append-only file of one run's records, and an index of the values in it.

    A journal that lies in the run's folder is continued. Each value of a record has a name, which is unique within the
    record's kind and scope (the step of metrics, the folder of an artifact, the context of a data set).

    Args:
        folder: The run's folder.
    """

    def __init__(self, folder: Path) -> None:
        path = journal_file(folder)
        path.parent.mkdir(parents=True, exist_ok=True)
        check_journal(folder)
        self._file = path.open("ab+")
        self._known: dict[tuple[str, str | int | None, str], Any] = {}
        self._file.seek(0)
        for line in complete_lines(self._file):
            # The sender reports a damaged line.
            with contextlib.suppress(ValueError):
                self._remember(read_record(line))
        # Removes the half line that a killed process may have left.
        self._file.truncate()

    def append_new(self, kind: str, values: Mapping[str, Any], scope: str | int | None) -> bool:
        """Appends those values that the journal does not hold yet; returns whether there are any.

        A metric or parameter in the journal keeps its value; other values are appended again if they have changed.
        """
        # MLflow would draw a second value of a metric at the same step, and refuse a second value of a parameter.
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
        """Appends one record with the current time, and returns once it is on disk."""
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
