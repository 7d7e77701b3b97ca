"""Tables that deployment appends to: what an operator says about decisions, and the log of a watch."""

from __future__ import annotations

import csv
import io
import json
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from lit_fedad.core.errors import UserError
from lit_fedad.core.files import atomic, stored_bytes, stored_text
from lit_fedad.core.text import csv_cell, printable
from lit_fedad.data.input_files import check_regular

if TYPE_CHECKING:
    from lit_fedad.deployment.ui.reading import ScoredFile

COLUMNS = ("path", "score", "p_value", "decision", "review", "run", "time")

Review = Literal["correct", "false alarm", "missed", "withdrawn"]
"""What an operator says of a decision; ``withdrawn`` takes back what was said before."""

_MOST_ROWS = 1_000_000


def add_review(file: Path, image: ScoredFile, review: Review, run: str) -> None:
    """Appends a line, and begins the file where there is none.

    Args:
        file: The CSV file; a later line about an image replaces an earlier one for whoever reads it.
        image: The image.
        review: What was wrong with the decision.
        run: The run whose detector decided.

    Raises:
        UserError: If the file cannot be written.
    """
    row = {
        "path": image.path,
        "score": f"{image.score:.9g}",
        "p_value": f"{image.p_value:.6g}",
        "decision": image.decision,
        "review": review,
        "run": run,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("a", newline="", encoding="utf-8", errors="surrogateescape") as out:
            writer = csv.DictWriter(out, COLUMNS)
            if not out.tell():
                writer.writeheader()
            writer.writerow({key: csv_cell(text) for key, text in row.items()})
    except OSError as error:
        raise UserError(f"{file}: cannot be written ({error.strerror})") from error


class Reviews:
    """The reviews of a file, of which the last about an image counts.

    Args:
        file: What `add_review` wrote.

    Raises:
        UserError: If it is no such file.
    """

    def __init__(self, file: Path) -> None:
        try:
            check_regular(file)
            with file.open(newline="", encoding="utf-8", errors="surrogateescape") as lines:
                rows = csv.DictReader(lines)
                self._said = {row["path"]: row["review"] for row in islice(rows, _MOST_ROWS)}
        except (OSError, ValueError, TypeError, KeyError, csv.Error) as error:
            raise UserError(
                f"reviews={file}: is no table of reviews ({' '.join(str(error).split())})"
            ) from error
        if unknown := set(self._said.values()) - set(get_args(Review)):
            known = ", ".join(get_args(Review))
            raise UserError(f"reviews={file}: review {min(map(str, unknown))!r} is none of {known}")

    def counts(self) -> dict[str, int]:
        """Counts the images by their last review, without those whose review was withdrawn."""
        return dict(Counter(said for said in self._said.values() if said != "withdrawn"))

    def of(self, image: Path, folder: Path) -> str | None:
        """Returns the last review of an image; None where there is none, or it was withdrawn.

        Args:
            image: Its path.
            folder: The folder that ``predict`` or ``watch`` was given: tables name images by whole paths, or by those
                below it.
        """
        below = image.relative_to(folder) if folder.is_dir() else Path(image.name)
        for name in (str(image), str(image.resolve()), printable(below.as_posix())):
            if (said := self._said.get(csv_cell(name))) is not None:
                return None if said == "withdrawn" else said
        return None


_IMAGE_COLUMNS = (
    *("path", "bytes", "modified", "score", "p_value", "threshold", "decision"),
    *("stream_p_value", "log10_martingale", "statistic", "alarm"),
)

Key = tuple[str, str, str]
"""What a file is recognised by: path in the folder, size in bytes, and time of its last change in nanoseconds."""


def key_of(path: Path, root: Path) -> Key:
    """Returns what a file is recognised by: a file that is written anew is another image.

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
                held = json.loads(stored_text(path))
                log.tracked = int(held.pop("tracked"))
            except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
                raise UserError(f"{path}: cannot be read; remove it and images.csv to begin anew") from error
            for name, value in settings.items():
                if held.get(name) != value:
                    raise UserError(
                        f"{folder}: holds a watch with {name}={held.get(name)}, not {name}={value}; give another"
                        " out=DIR"
                    )
            return log
        log.save()
        return log

    def save(self) -> None:
        """Writes ``watch.json``, completely or not at all.

        Raises:
            UserError: If it cannot be written.
        """
        try:
            with atomic(self.folder / "watch.json", durable=True) as partial:
                partial.write_text(json.dumps({**self.settings, "tracked": self.tracked}, indent=1))
        except OSError as error:
            raise UserError(f"{self.folder}: cannot be written ({error.strerror})") from error

    def rows(self) -> list[dict[str, str]]:
        """Reads the images so far, and cuts off what a killed call left half written.

        Raises:
            UserError: If the table is not one of a watch.
        """
        if not self.images.exists():
            self.append([])
        try:
            content = stored_bytes(self.images)
            whole = content[: content.rfind(b"\n") + 1]
            if len(whole) < len(content):
                self.images.write_bytes(whole)
            table = csv.DictReader(io.StringIO(whole.decode("utf-8", "surrogateescape"), newline=""))
            rows = list(table)
            if tuple(table.fieldnames or ()) != _IMAGE_COLUMNS:
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
        try:
            new = not self.images.exists()
            with self.images.open("a", newline="", encoding="utf-8", errors="surrogateescape") as file:
                writer = csv.DictWriter(file, _IMAGE_COLUMNS)
                if new:
                    writer.writeheader()
                writer.writerows(rows)
        except OSError as error:
            raise UserError(f"{self.images}: cannot be written ({error.strerror})") from error
