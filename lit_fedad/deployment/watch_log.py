"""The log of a watch: a line of CSV for each image, from which the same command continues."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lit_fedad.core.errors import UserError
from lit_fedad.core.files import atomic, open_to_append, stored_bytes, stored_text, unwritable_in_one_line
from lit_fedad.core.plain_values import plain_json
from lit_fedad.core.text import csv_cell, printable

KEY_COLUMNS = ("path", "bytes", "modified")
COLUMNS = (
    *(*KEY_COLUMNS, "score", "p_value", "threshold", "decision"),
    *("stream_p_value", "log10_martingale", "statistic", "alarm"),
)

Key = tuple[str, str, str]
"""Identity of a file: path in the folder, size in bytes, and time of its last change in nanoseconds."""


def key_of(path: Path, root: Path) -> Key:
    """Returns the identity of a file: a file that is written anew is another image.

    Raises:
        OSError: If it is gone.
    """
    stat = path.stat()
    name = path.relative_to(root) if root.is_dir() else Path(path.name)
    return csv_cell(printable(name.as_posix())), str(stat.st_size), str(stat.st_mtime_ns)


@dataclass
class WatchLog:
    """The files of a watch in its folder: ``images.csv``, and ``watch.json``, what all of its calls have in common.

    Attributes:
        folder: The folder.
        settings: What all calls must have in common.
        tracked: Number of images that the last record in MLflow counts.
    """

    folder: Path
    settings: Mapping[str, Any]
    tracked: int = 0

    @property
    def images(self) -> Path:
        """The table of images."""
        return self.folder / "images.csv"

    @classmethod
    def open(cls, folder: Path, settings: Mapping[str, Any]) -> WatchLog:
        """Begins a log, or continues the one that lies in the folder.

        Raises:
            UserError: If it was begun with other settings, cannot be read, or the folder cannot be written.
        """
        log, path = cls(folder, settings), folder / "watch.json"
        if path.exists():
            try:
                stored = plain_json(stored_text(path))
                log.tracked = int(stored.pop("tracked"))
            except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
                raise UserError(f"{path}: cannot be read; remove it and images.csv to begin anew") from error
            for name, value in settings.items():
                if stored.get(name) != value:
                    differs = f"with {name}={stored.get(name)}, not {name}={value}"
                    if name == "calibration":  # all scores, in one line
                        differs = "by the calibration scores of another version of the detector"
                    raise UserError(f"{folder}: holds a watch {differs}; give another out=DIR")
            return log
        log.save()
        return log

    def save(self) -> None:
        """Writes ``watch.json``, completely or not at all.

        Raises:
            UserError: If it cannot be written.
        """
        with unwritable_in_one_line(self.folder), atomic(self.folder / "watch.json", durable=True) as partial:
            partial.write_text(json.dumps({**self.settings, "tracked": self.tracked}, indent=1))

    def rows(self) -> list[dict[str, str]]:
        """Reads the images so far, and cuts off what a killed call left half written.

        Raises:
            UserError: If the table is not one of a watch.
        """
        try:
            content = stored_bytes(self.images) if self.images.exists() else b""
            complete = content[: content.rfind(b"\n") + 1]
            if not complete and not ",".join(COLUMNS).encode().startswith(content.rstrip(b"\r")):
                raise ValueError("a file of somebody else")
            if len(complete) < len(content):
                self.images.write_bytes(complete)
            if not complete:
                self.append([])
                return []
            table = csv.DictReader(io.StringIO(complete.decode("utf-8", "surrogateescape"), newline=""))
            rows = list(table)
            if tuple(table.fieldnames or ()) != COLUMNS:
                raise ValueError("other columns")
            for row in rows:
                float(row["score"] or 0)
        except (OSError, ValueError, TypeError, csv.Error) as error:
            raise UserError(
                f"{self.images}: not the table of a watch; remove it and watch.json to begin anew"
            ) from error
        return rows

    def append(self, rows: Iterable[Mapping[str, str]]) -> None:
        """Appends images, and begins the table where there is none.

        Raises:
            UserError: If it cannot be written.
        """
        with unwritable_in_one_line(self.images), open_to_append(self.images) as file:
            writer = csv.DictWriter(file, COLUMNS)
            if not file.tell():
                writer.writeheader()
            writer.writerows(rows)
