"""Exported detectors: found in a run's folder or in MLflow's model registry, and registered there."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from lit_fedad.core.client_names import ClientNames
from lit_fedad.core.errors import UserError
from lit_fedad.deployment.detector_sheet import SHEET, read_sheet
from lit_fedad.deployment.formats import FORMATS
from lit_fedad.experiment.run_folder import RunFolder
from lit_fedad.report.console import Display
from lit_fedad.tracking.registry import SCHEME, fetch_version, register_files

_CARD = "model_card.md"
_FILES = frozenset(
    {SHEET, _CARD, "preprocessing.json", *(name for form in FORMATS.values() for name in form.files)}
)


@dataclass(frozen=True)
class RegisterOptions:
    """Options of ``lit-fedad register``.

    Attributes:
        run: MLflow run id, folder of a run, or folder that ``lit-fedad export`` wrote.
        name: Name of the registered model.
        alias: Alias that names this version from now on, such as ``production``.
        client: Whose exported detector is registered; may be left out where only one was exported.
        version: Number of the detector's version in the run: 0 as it was trained, None for the default.
    """

    run: str
    name: str
    alias: str | None = None
    client: int | str | None = None
    version: int | None = None


def register(options: RegisterOptions, display: Display) -> None:
    """Registers an exported detector, with its sheet and card, as a version of a model in MLflow.

    Args:
        options: Options of the command.
        display: Shows the version and how it is fetched.

    Raises:
        UserError: If there is no such exported detector, a file of it was changed, or the server refuses.
    """
    if options.run.startswith(SCHEME):
        raise UserError(
            f"run={options.run}: is registered already; give a run, or the folder of an exported detector"
        )
    folder = find_exported(options.run, options.client, options.version)
    sheet = read_sheet(folder)
    hashed = sheet.sha256.keys() & _FILES
    for name in hashed:
        sheet.content(folder, name)  # refuses what was changed
    files = [folder / name for name in sorted({*hashed, SHEET, _CARD}) if (folder / name).is_file()]
    version = register_files(files, options.name, options.alias, {"lit_fedad.detector": sheet.name})
    address = f"{SCHEME}{options.name}" + (f"@{options.alias}" if options.alias else f"/{version}")
    display.where_next(
        [
            ("registered", f"{options.name}, version {version}: {sheet.name}"),
            ("serve", f"lit-fedad serve run={address}"),
        ]
    )


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
        cache = Path(os.environ.get("LIT_FEDAD_CACHE") or "~/.cache/lit_fedad").expanduser()
        return fetch_version(run, _FILES, cache / "registered")
    given = Path(run)
    if (given / SHEET).is_file():
        return given
    version_folder = RunFolder.find(run).version(version)
    folder, names = version_folder.path, ClientNames.of(version_folder.result() or {})
    found = {path.parent.name: path.parent for path in sorted((folder / "export").glob(f"*/{SHEET}"))}
    number = None if client is None else names.number(str(client))
    wanted = list(found) if number is None else [f"client_{names.label(number)}"]
    if not found or wanted[0] not in found:
        name = "" if client is None else f" client={client}"
        raise UserError(f"{folder}: no exported detector{name}; first: lit-fedad export run={run}{name}")
    if len(wanted) > 1:
        raise UserError(f"{folder}: give client=N, one of {', '.join(found)}")
    return found[wanted[0]]
