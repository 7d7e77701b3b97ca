"""MLflow's model registry: registers files as versions of a model, and fetches a version by its number or alias."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Mapping
from pathlib import Path

from filelock import FileLock

from lit_fedad.core.errors import UserError
from lit_fedad.core.text import redact
from lit_fedad.tracking.server import connect, connect_existing, destination, fetch_file, list_files, one_line

SCHEME = "models:/"
"""Beginning of the address of a registered version."""

_NAME, _ALIAS = r"[^/@:'\"]{1,250}", r"[A-Za-z0-9_-]{1,250}"
_ADDRESS = re.compile(rf"models:/(?P<name>{_NAME})(?:@(?P<alias>{_ALIAS})|/(?P<version>\d{{1,9}}))")
_EXPERIMENT = "registered detectors"  # MLflow experiment of the runs that hold registered files
_FOLDER = "detector"  # folder of the files among the artifacts of such a run
LARGEST_FILE = 2**31  # most bytes of a file: the limit of ONNX


def register_files(
    files: Collection[Path], name: str, alias: str | None = None, tags: Mapping[str, str] | None = None
) -> str:
    """Registers files as the next version of a model; the first version creates the model.

    The files are logged to a run of their own, whose artifacts nothing changes later. The alias names this version from
    now on.

    Returns:
        The number of the version.

    Raises:
        UserError: If `fetch_version` could not find the name or alias, or if the server does not answer or refuses.
    """
    if not (re.fullmatch(_NAME, name) and name.isprintable() and name.strip(" .")):
        raise UserError(f"name={name} must be 1 to 250 printable characters without / @ : and quotes")
    reserved = alias is not None and re.fullmatch(r"latest|v\d+", alias, re.IGNORECASE)
    if reserved or (alias is not None and not re.fullmatch(_ALIAS, alias)):
        raise UserError(
            f"alias={alias} must be letters, digits, '_' and '-', and neither latest nor v1, v2, ..."
        )
    uri = destination(None)
    try:
        client = connect(uri)
        if not client.search_registered_models(f"name = '{name}'"):
            client.create_registered_model(name)
        experiment = client.get_experiment_by_name(_EXPERIMENT)
        experiment_id = experiment.experiment_id if experiment else client.create_experiment(_EXPERIMENT)
        run = client.create_run(experiment_id, run_name=name, tags=dict(tags or {}))
        for file in files:
            client.log_artifact(run.info.run_id, str(file), _FOLDER)
        client.set_terminated(run.info.run_id)
        source = f"{run.info.artifact_uri}/{_FOLDER}"
        version = client.create_model_version(name, source, run.info.run_id, dict(tags or {})).version
        if alias:
            client.set_registered_model_alias(name, alias, version)
    except Exception as cause:
        raise _failure(f"name={name}", cause, uri) from None  # the cause may hold the password
    return str(version)


def fetch_version(address: str, names: Collection[str], into: Path) -> Path:
    """Copies files of a registered version from the server; a version that was fetched before is not copied again.

    Args:
        address: ``models:/NAME@ALIAS`` or ``models:/NAME/VERSION``.
        names: Names of the files to copy; other files, and folders, are not copied.
        into: Folder in which the version gets a folder of its own.

    Returns:
        The version's folder.

    Raises:
        UserError: If the address has another form, the registry has no such version or none of the files, a file is
            larger than 2 GiB, or the server does not answer.
    """
    match = _ADDRESS.fullmatch(address)
    if match is None:
        raise UserError(f"run={address}: give models:/NAME@ALIAS or models:/NAME/VERSION")
    uri = destination(None)
    client = connect_existing(uri, address)
    try:
        name, alias, number = match["name"], match["alias"], match["version"]
        version = (
            client.get_model_version_by_alias(name, alias)
            if alias
            else client.get_model_version(name, number)
        )
        source = client.get_model_version_download_uri(version.name, version.version)
        identity = repr((redact(uri), version.name, version.version, version.creation_timestamp, source))
        folder = into / hashlib.sha256(identity.encode()).hexdigest()[:16]
        into.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{folder}-lock"):
            if not folder.is_dir():
                sizes = {name: size for name, size in list_files(source, uri).items() if name in names}
                _check(address, sizes)
                draft = folder.with_name(f"{folder.name}-draft")
                for name in sizes:
                    fetch_file(f"{source}/{name}", draft, uri)
                draft.replace(folder)
    except UserError:
        raise
    except Exception as cause:
        raise _failure(address, cause, uri) from None
    return folder


def _check(address: str, sizes: Mapping[str, int]) -> None:
    """Refuses a version without the wanted files, or with one that is too large."""
    if not sizes:
        raise UserError(f"{address}: holds no detector; register one: lit-fedad register run=RUN name=NAME")
    for name, size in sizes.items():
        if size > LARGEST_FILE:
            raise UserError(f"{address}: {name} has {size} bytes, and at most {LARGEST_FILE} are fetched")


def _failure(what: str, cause: Exception, uri: str) -> UserError:
    return UserError(f"{what}: the model registry at {redact(uri)} says: {one_line(cause, uri)}")
