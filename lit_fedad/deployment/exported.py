"""Exported detectors: what is written beside them, where they are found, and how MLflow registers them."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from lit_fedad.core.client_names import ClientNames
from lit_fedad.core.errors import UserError, one_line
from lit_fedad.core.files import atomic, stored_bytes, stored_text, user_cache
from lit_fedad.core.plain_values import plain_json
from lit_fedad.core.text import shell_word
from lit_fedad.deployment.formats import FORMATS
from lit_fedad.experiment.run_folder import RunFolder
from lit_fedad.report.console import Display
from lit_fedad.report.naming import named_version
from lit_fedad.tracking.registry import LARGEST_FILE, SCHEME, fetch_version, register_files

if TYPE_CHECKING:
    from lit_fedad.deployment.model_card import Facts

SHEET = "detector.json"
_FORMAT = 1
_FORMAT_FILES = frozenset(name for form in FORMATS.values() for name in form.files)
_EXPORT_AGAIN = "export the detector again: lit-fedad export run=RUN"


@dataclass(frozen=True)
class DetectorSheet:
    """Content of ``detector.json``.

    Attributes:
        name: Method, data, client and version, in words.
        alpha: Promised rate of false alarms; None for classifiers.
        threshold: Score above which images are anomalous; None where alpha cannot be promised, and for classifiers.
        colour: Score at the middle of heatmaps' colours; None for classifiers.
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
            content = stored_bytes(path, LARGEST_FILE)
        except OSError as error:
            raise UserError(f"{path}: cannot be read ({error.strerror}); {_EXPORT_AGAIN}") from error
        if hashlib.sha256(content).hexdigest() != self.sha256[name]:
            raise UserError(f"{path}: changed since it was exported; {_EXPORT_AGAIN}")
        return content


def write_sheet(folder: Path, facts: Facts) -> DetectorSheet:
    """Writes ``detector.json`` beside the files of an exported detector.

    Formats that an earlier export of the same detector wrote stay listed. Those of another detector, such as that of
    another product, are removed, with a warning: no sheet and no card would tell their threshold.

    Args:
        folder: Their folder.
        facts: What their model card states.

    Returns:
        What the file says.
    """
    result, rule = facts.result, facts.rules.get(facts.client)
    files = [*(name for file in facts.files for name in file.files), "preprocessing.json"]
    sheet = DetectorSheet(
        name=f"{result['method']}, {result['data']}, {facts.title}{named_version(result)}",
        alpha=rule.alpha if rule else None,
        threshold=rule.threshold if rule and math.isfinite(rule.threshold) else None,
        colour=rule.colour if rule else None,
        classes=tuple(result["partition"]["products"]) if facts.classifies else (),
        sha256={name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in files},
    )
    earlier = _earlier_sheet(folder)
    if earlier and replace(earlier, sha256={}) == replace(sheet, sha256={}):
        sheet = replace(sheet, sha256={**earlier.sha256, **sheet.sha256})
    elif earlier:
        for name in (_FORMAT_FILES & earlier.sha256.keys()) - sheet.sha256.keys():
            (folder / name).unlink()
            warnings.warn(f"{folder / name}: was of another detector, and is removed", stacklevel=2)
    with atomic(folder / SHEET) as partial:
        partial.write_text(json.dumps({"format": _FORMAT, **asdict(sheet)}, indent=1))
    return sheet


def _earlier_sheet(folder: Path) -> DetectorSheet | None:
    """Reads what an earlier export wrote, without files that have changed since; None where it cannot be read."""
    try:
        sheet = read_sheet(folder)
    except UserError:
        return None
    unchanged = {}
    for name, digest in sheet.sha256.items():
        with contextlib.suppress(UserError):
            sheet.content(folder, name)
            unchanged[name] = digest
    return replace(sheet, sha256=unchanged)


def read_sheet(folder: Path) -> DetectorSheet:
    """Reads ``detector.json``.

    Args:
        folder: Folder of an exported detector.

    Raises:
        UserError: If there is none, or it is no such sheet.
    """
    path = folder / SHEET
    try:
        stored = plain_json(stored_text(path))
        if stored.pop("format") != _FORMAT:
            raise ValueError("another version of lit_fedad wrote it")
        sheet = DetectorSheet(**{**stored, "classes": tuple(stored["classes"])})
        numbers = [value for value in (sheet.alpha, sheet.threshold, sheet.colour) if value is not None]
        if not all(type(value) in (int, float) and math.isfinite(value) for value in numbers):
            raise ValueError("a number is none")
        if sheet.alpha is not None and not 0 < sheet.alpha < 1:
            raise ValueError(f"alpha={sheet.alpha} is no rate above 0 and below 1")
        texts = [sheet.name, *sheet.classes, *sheet.sha256, *sheet.sha256.values()]
        if not all(isinstance(text, str) for text in texts):
            raise ValueError("a text is none")
    except FileNotFoundError:
        raise UserError(f"{path}: there is none; {_EXPORT_AGAIN}") from None
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserError(f"{path}: cannot be read ({one_line(error)}); {_EXPORT_AGAIN}") from error
    return sheet


_CARD = "model_card.md"
_FILES = _FORMAT_FILES | {SHEET, _CARD, "preprocessing.json"}


def register(
    run: str,
    name: str,
    display: Display,
    alias: str | None = None,
    client: int | str | None = None,
    version: int | None = None,
) -> None:
    """Registers an exported detector, with its decision rule and model card, as a version of a model in MLflow.

    Args:
        run: MLflow run id, folder of a run, or folder that ``lit-fedad export`` wrote.
        name: Name of the registered model.
        display: Shows the version and how it is fetched.
        alias: Alias that names this version from now on, such as ``production``.
        client: Whose exported detector is registered; may be left out where only one was exported.
        version: Number of the detector's version in the run: 0 as it was trained, None for the default.

    Raises:
        UserError: If there is no such exported detector, a file of it was changed, or the server refuses.
    """
    if run.startswith(SCHEME):
        raise UserError(
            f"run={run}: is registered already; give a run, or the folder of an exported detector"
        )
    folder = find_exported(run, client, version)
    sheet = read_sheet(folder)
    hashed = sheet.sha256.keys() & _FILES
    for file in hashed:
        sheet.content(folder, file)  # refuses what was changed
    files = [folder / file for file in sorted({*hashed, SHEET, _CARD}) if (folder / file).is_file()]
    number = register_files(files, name, alias, {"lit_fedad.detector": sheet.name})
    address = f"{SCHEME}{name}" + (f"@{alias}" if alias else f"/{number}")
    display.where_next(
        [
            ("registered", f"{name}, version {number}: {sheet.name}"),
            ("serve", f"lit-fedad serve {shell_word(f'run={address}')}"),
        ]
    )


def onnx_exports(run: Path) -> list[Path]:
    """Lists the folders of a run's exported detectors that have the file for ONNX Runtime, by name."""
    return sorted(path.parent for path in (run / "export").glob(f"*/{FORMATS['onnx'].files[0]}"))


def find_exported(run: str, client: int | str | None = None, version: int | None = None) -> Path:
    """Finds the folder of an exported detector; one of the registry is fetched.

    Args:
        run: MLflow run id, folder of a run, folder that ``lit-fedad export`` wrote, or a registered version:
            ``models:/NAME@ALIAS`` or ``models:/NAME/VERSION``.
        client: Whose detector; None where only one was exported.
        version: Number of the detector's version in the run: 0 as it was trained, None for the default.

    Raises:
        UserError: If there is none, or several and none is chosen.
    """
    if run.startswith(SCHEME):
        return fetch_version(run, _FILES, user_cache() / "registered")
    given = Path(run)
    if (given / SHEET).is_file():
        return given
    version_folder = RunFolder.find(run).version(version)
    folder, names = version_folder.path, ClientNames.of(version_folder.result() or {})
    exported, name = sorted(path.parent for path in (folder / "export").glob(f"*/{SHEET}")), ""
    if client is not None:
        number, name = names.number(str(client)), f" client={client}"
        label = client if number is None else names.label(number)
        exported = [path for path in exported if path.name == f"client_{label}"]
    if not exported:
        raise UserError(
            f"{folder}: no exported detector{name}; first: lit-fedad export {shell_word(f'run={run}')}{name}"
        )
    if len(exported) > 1:
        labels = ", ".join(path.name.removeprefix("client_") for path in exported)
        raise UserError(f"{folder}: give client=N, one of {labels}")
    return exported[0]
