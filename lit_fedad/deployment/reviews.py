"""What an operator says about decisions, as a CSV file: `lit-fedad ui` writes it, `lit-fedad update` reads it."""

from __future__ import annotations

import csv
import fcntl
import os
import time
from collections import Counter
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

from lit_fedad.core.errors import UserError, one_line
from lit_fedad.core.files import open_to_append, stored_bytes, unwritable_in_one_line
from lit_fedad.core.text import csv_cell, printable
from lit_fedad.data.input_files import written_rows
from lit_fedad.federation.chained_log import TIME

if TYPE_CHECKING:
    from lit_fedad.deployment.ui.reading import ScoredFile

COLUMNS = ("path", "score", "p_value", "decision", "review", "run", "time")

Review = Literal["correct", "false alarm", "missed", "withdrawn"]
"""What an operator says of a decision; ``withdrawn`` takes back what was said before."""

_MAX_ROWS = 1_000_000


def add_review(file: Path, image: ScoredFile, review: Review, run: str) -> None:
    """Appends a line in the columns of the file, and begins the file where there is none.

    Args:
        file: The CSV file; a later line about an image replaces an earlier one for whoever reads it.
        image: The image.
        review: What the operator says of the decision.
        run: The run whose detector decided.

    Raises:
        UserError: If the file cannot be written, or has other columns.
    """
    row = {
        "path": image.path,
        "score": f"{image.score:.9g}",
        "p_value": f"{image.p_value:.6g}",
        "decision": image.decision,
        "review": review,
        "run": run,
        "time": time.strftime(TIME, time.gmtime()),
    }
    with unwritable_in_one_line(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        with open_to_append(file) as out:
            fcntl.flock(out, fcntl.LOCK_EX)  # two browsers may begin the file at once
            columns, is_complete = _columns(file)
            out.seek(0, os.SEEK_END)
            writer = csv.DictWriter(out, columns, extrasaction="ignore")
            if not out.tell():
                writer.writeheader()
            elif not is_complete:
                out.write("\r\n")
            writer.writerow({key: csv_cell(text) for key, text in row.items()})


def _columns(file: Path) -> tuple[Sequence[str], bool]:
    """Reads the columns of a file, which somebody may have reordered, and whether its last line is complete."""
    if not file.is_file() or not file.stat().st_size:
        return COLUMNS, True
    columns = _checked(written_rows(file).fieldnames or (), file, ", or give another out=FILE")
    return columns, stored_bytes(file).endswith(b"\n")


def _checked(columns: Sequence[str], file: Path, alternative: str = "") -> Sequence[str]:
    """Returns the columns of a file, if those of reviews are among them.

    Raises:
        UserError: If one is missing, as where a spreadsheet has separated them by semicolons.
    """
    if missing := {"path", "review"} - set(columns):
        advice = f"save it as CSV in UTF-8 with commas{alternative}"
        raise UserError(f"reviews={file}: has no column {min(missing)}; {advice}")
    return columns


class Reviews:
    """The reviews of a file, of which the last about an image counts.

    Args:
        file: What `add_review` wrote.

    Raises:
        UserError: If it is no such file.
    """

    def __init__(self, file: Path) -> None:
        try:
            rows = written_rows(file)
            if rows.fieldnames:
                _checked(rows.fieldnames, file)
            self._last_reviews = {row["path"]: row["review"] for row in islice(rows, _MAX_ROWS)}
        except (OSError, ValueError, TypeError, KeyError, csv.Error) as error:
            raise UserError(f"reviews={file}: is no table of reviews ({one_line(error)})") from error
        if unknown := set(self._last_reviews.values()) - set(get_args(Review)):
            allowed = ", ".join(get_args(Review))
            raise UserError(f"reviews={file}: review {min(map(str, unknown))!r} is none of {allowed}")

    def counts(self) -> dict[str, int]:
        """Counts the images by their last review, without those whose review was withdrawn."""
        return dict(Counter(review for review in self._last_reviews.values() if review != "withdrawn"))

    def of(self, image: Path, folder: Path) -> str | None:
        """Returns the last review of an image; None where there is none, or it was withdrawn.

        Args:
            image: Its path.
            folder: The folder that ``predict`` or ``watch`` was given: tables name images by whole paths, or by those
                below it.
        """
        relative = image.relative_to(folder) if folder.is_dir() else Path(image.name)
        for name in (str(image), str(image.resolve()), printable(relative.as_posix())):
            if (review := self._last_reviews.get(csv_cell(name))) is not None:
                return None if review == "withdrawn" else review
        return None
