"""The sheet of an exported detector, ``detector.json``: what a program must know to use its files, and their hashes."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from lit_fedad.core.errors import UserError
from lit_fedad.data.input_files import check_regular, read_json

if TYPE_CHECKING:
    from lit_fedad.deployment.model_card import Facts

SHEET = "detector.json"
_FORMAT = 1
_EXPORT_AGAIN = "export the detector again: lit-fedad export run=RUN"


@dataclass(frozen=True)
class DetectorSheet:
    """What stands in ``detector.json``.

    Attributes:
        name: Method, data, client and version, in words.
        alpha: Promised rate of false alarms; None for classifiers.
        threshold: Score above which images are anomalous; None where alpha cannot be promised, and for classifiers.
        colour: Score in the middle of heatmaps' colours; None for classifiers.
        classes: Names of a classifier's classes.
        sha256: Hash of each file.
    """

    name: str
    alpha: float | None
    threshold: float | None
    colour: float | None
    classes: tuple[str, ...]
    sha256: Mapping[str, str]

    @property
    def classifies(self) -> bool:
        """Tells whether it is a classifier."""
        return self.colour is None

    def content(self, folder: Path, name: str) -> bytes:
        """Reads a file of the detector.

        Args:
            folder: The detector's folder.
            name: Name of the file.

        Raises:
            UserError: If it is missing, or is not the file that was exported.
        """
        path = folder / name
        if name not in self.sha256:
            raise UserError(f"{folder}: holds no {name}; {_EXPORT_AGAIN} format=onnx")
        try:
            check_regular(path)
            content = path.read_bytes()
        except OSError as error:
            raise UserError(f"{path}: cannot be read ({error.strerror}); {_EXPORT_AGAIN}") from error
        if hashlib.sha256(content).hexdigest() != self.sha256[name]:
            raise UserError(f"{path}: changed since it was exported; {_EXPORT_AGAIN}")
        return content


def write_sheet(folder: Path, facts: Facts) -> Path:
    """Writes ``detector.json`` beside the files of an exported detector.

    Args:
        folder: Their folder.
        facts: What their model card states.

    Returns:
        The file.
    """
    result, rule = facts.result, facts.rules.get(facts.client)
    version = f", version {result['version']}" if "version" in result else ""
    files = [*(name for file in facts.files for name in file.files), "preprocessing.json"]
    sheet = DetectorSheet(
        name=f"{result['method']}, {result['data']}, {facts.title}{version}",
        alpha=rule.alpha if rule else None,
        threshold=rule.threshold if rule and math.isfinite(rule.threshold) else None,
        colour=rule.colour if rule else None,
        classes=tuple(result["partition"]["products"]) if facts.classifies else (),
        sha256={name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in files},
    )
    sheet = replace(sheet, sha256={**formats_of_before(folder, sheet), **sheet.sha256})
    path = folder / SHEET
    path.write_text(json.dumps({"format": _FORMAT, **asdict(sheet)}, indent=1))
    return path


def formats_of_before(folder: Path, sheet: DetectorSheet) -> dict[str, str]:
    """Returns the hashes of files that an earlier export of the same detector wrote, and that are still the same.

    Args:
        folder: The detector's folder.
        sheet: The sheet of the export.
    """
    try:
        before = read_sheet(folder)
    except UserError:
        return {}
    if replace(before, sha256={}) != replace(sheet, sha256={}):
        return {}
    kept = {}
    for name, digest in before.sha256.items():
        with contextlib.suppress(UserError):
            before.content(folder, name)
            kept[name] = digest
    return kept


def read_sheet(folder: Path) -> DetectorSheet:
    """Reads ``detector.json``.

    Args:
        folder: Folder of an exported detector.

    Raises:
        UserError: If there is none, or it is no such sheet.
    """
    path = folder / SHEET
    try:
        stored = read_json(path)
        if stored.pop("format") != _FORMAT:
            raise ValueError("another version of lit_fedad wrote it")
        sheet = DetectorSheet(**{**stored, "classes": tuple(stored["classes"])})
        numbers = [value for value in (sheet.alpha, sheet.threshold, sheet.colour) if value is not None]
        if not all(type(value) in (int, float) and math.isfinite(value) for value in numbers):
            raise ValueError("a number is none")
        texts = [sheet.name, *sheet.classes, *sheet.sha256, *sheet.sha256.values()]
        if not all(isinstance(text, str) for text in texts):
            raise ValueError("a text is none")
    except FileNotFoundError:
        raise UserError(f"{path}: there is none; {_EXPORT_AGAIN}") from None
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserError(
            f"{path}: cannot be read ({' '.join(str(error).split())}); {_EXPORT_AGAIN}"
        ) from error
    return sheet
