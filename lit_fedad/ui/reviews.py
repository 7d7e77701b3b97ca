"""What an operator says about decisions, as a CSV file for the next calibration."""

from __future__ import annotations

import csv
import time
from pathlib import Path
from typing import Literal

from lit_fedad.errors import UserError
from lit_fedad.guards.text import csv_cell
from lit_fedad.ui.reading import Scored

COLUMNS = ("path", "score", "p_value", "decision", "review", "run", "time")

Review = Literal["false alarm", "missed"]


def add_review(file: Path, image: Scored, review: Review, run: str) -> None:
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


def count_reviews(file: Path) -> int:
    """Counts the lines of a file of reviews."""
    try:
        with file.open(newline="", encoding="utf-8", errors="surrogateescape") as rows:
            return sum(1 for _ in csv.DictReader(rows))
    except OSError:
        return 0
