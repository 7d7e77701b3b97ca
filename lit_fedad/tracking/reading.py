"""Runs and registered detectors as the tracking server knows them."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock

from lit_fedad.core.errors import UserError
from lit_fedad.core.text import redact
from lit_fedad.tracking.server import (
    FOLDER_TAG,
    connect,
    connect_existing,
    destination,
    fetch_file,
    is_database,
    list_files,
    one_line,
)


@dataclass(frozen=True)
class TrackedRun:
    """A run as MLflow knows it.

    Attributes:
        status: ``FINISHED``, ``RUNNING``, ``FAILED`` or ``KILLED``.
        started: Time of its start, in milliseconds since 1970.
        metrics: The last value of each metric.
    """

    run_id: str
    experiment_id: str
    experiment: str
    name: str
    status: str
    started: int
    tags: Mapping[str, str]
    params: Mapping[str, str]
    metrics: Mapping[str, float]

    @property
    def folder(self) -> Path | None:
        """Folder that its files were written to; None for a run that is not lit-fedad's."""
        return Path(self.tags[FOLDER_TAG]) if FOLDER_TAG in self.tags else None

    @property
    def parent(self) -> str | None:
        """Id of the run that it is listed under."""
        return self.tags.get("mlflow.parentRunId")


def find_run_folder(run_id: str) -> Path:
    """Returns the folder that an MLflow run was written to.

    A database file is the user's own. What another server says of a folder is believed only of ``outputs`` in the
    working directory: whoever may write to the server could name any folder.

    Raises:
        UserError: The server does not know the run, the folder is not on this machine, or elsewhere.
    """
    uri = destination(None)
    client = connect_existing(uri, f"MLflow run {run_id}")
    try:
        tags = client.get_run(run_id).data.tags
    except Exception as cause:
        raise UserError(
            f"MLflow run {run_id} was not found at {redact(uri)}: {one_line(cause, uri)}"
        ) from None  # its cause may name the password
    if FOLDER_TAG not in tags:
        raise UserError(
            f"MLflow run {run_id} at {redact(uri)} has no tag {FOLDER_TAG}: it is no run of lit-fedad"
        )
    folder = Path(tags[FOLDER_TAG])
    if not is_database(uri) and not folder.resolve().is_relative_to(Path("outputs").resolve()):
        raise UserError(
            f"MLflow run {run_id}: the server says that it was written to {folder}, which is not in outputs/; if you"
            f" trust that folder, give run={folder}"
        )
    if not folder.is_dir():
        raise UserError(f"MLflow run {run_id} was written to {folder}, which is not there; name its folder")
    return folder


def tracked_runs(experiments: Sequence[str] = (), uri: str | None = None) -> list[TrackedRun]:
    """Returns the runs of some experiments, or of all, ordered by their start.

    Args:
        experiments: Names of MLflow experiments; none for all.
        uri: Tracking URI, as for `lit_fedad.tracking.tracker.Tracker`.

    Raises:
        UserError: The server does not answer, or has no such experiment.
    """
    uri = destination(uri)
    client = connect_existing(uri, "tracked runs")
    try:
        named = {experiment.name: experiment.experiment_id for experiment in client.search_experiments()}
        for name in experiments:
            if name not in named:
                raise UserError(
                    f"experiment={name}: {redact(uri)} has none of this name, only {', '.join(named)}"
                )
        names = {named[name]: name for name in experiments or named}
        found, token = [], None
        while names:
            page = client.search_runs(list(names), order_by=["attributes.start_time"], page_token=token)
            found += list(page)
            if not (token := page.token):
                break
    except UserError:
        raise
    except Exception as cause:
        raise UserError(f"{redact(uri)}: {one_line(cause, uri)}") from None  # its cause may name the password
    return [
        TrackedRun(
            run.info.run_id,
            run.info.experiment_id,
            names[run.info.experiment_id],
            run.info.run_name,
            run.info.status,
            run.info.start_time,
            run.data.tags,
            run.data.params,
            run.data.metrics,
        )
        for run in found
    ]


def metric_history(run_id: str, metric: str, uri: str | None = None) -> list[tuple[int, float]]:
    """Returns the values of one metric of a run over its steps.

    Returns:
        Pairs (step, value), steps ascending; of several values at a step the last that was logged.
    """
    points = connect(destination(uri)).get_metric_history(run_id, metric)
    return sorted({point.step: point.value for point in points}.items())


def fetch_artifacts(run_id: str, names: Sequence[str], into: Path, uri: str | None = None) -> Path:
    """Copies some of a run's artifacts from the server; folders with all that they hold."""
    client = connect(destination(uri))
    for artifact in client.list_artifacts(run_id):
        if artifact.path in names:
            client.download_artifacts(run_id, artifact.path, str(into))
    return into


SCHEME = "models:/"
"""How the address of a registered version begins."""

_ADDRESS = re.compile(r"models:/(?P<name>[^/@:]+)(?:@(?P<alias>[^/@:]+)|/(?P<version>\d{1,9}))")
_EXPERIMENT = "registered detectors"
_FOLDER = "detector"  # of the files among a registering run's artifacts
_LARGEST = 2**31  # bytes of a file: what ONNX allows


def register_files(
    files: Collection[Path], name: str, alias: str | None = None, tags: Mapping[str, str] | None = None
) -> str:
    """Registers files as the next version of a model, which is made with its first version.

    The files are logged to a run of their own, whose artifacts nothing changes later. An alias names this version from
    now on.

    Raises:
        UserError: If the server does not answer, or refuses a name.
    """
    uri = destination(None)
    client = connect(uri)
    try:
        experiment = client.get_experiment_by_name(_EXPERIMENT)
        place = experiment.experiment_id if experiment else client.create_experiment(_EXPERIMENT)
        run = client.create_run(place, run_name=name, tags=dict(tags or {}))
        for file in files:
            client.log_artifact(run.info.run_id, str(file), _FOLDER)
        client.set_terminated(run.info.run_id)
        if not client.search_registered_models(f"name = '{name}'"):
            client.create_registered_model(name)
        source = f"{run.info.artifact_uri}/{_FOLDER}"
        version = client.create_model_version(name, source, run.info.run_id, dict(tags or {})).version
        if alias:
            client.set_registered_model_alias(name, alias, version)
    except Exception as cause:
        raise _failure(f"name={name}", cause, uri) from None  # its cause may name the password
    return str(version)


def fetch_version(address: str, names: Collection[str], into: Path) -> Path:
    """Copies files of a registered version from the server; a version that was fetched before is not copied again.

    Args:
        address: ``models:/NAME@ALIAS`` or ``models:/NAME/VERSION``.
        names: Names of the files; others, and folders, stay there.
        into: Folder in which the version gets one of its own.

    Raises:
        UserError: If the address is none, the registry has no such version or none of the files, a file is larger than
            2 GiB, or the server does not answer.
    """
    wanted = _ADDRESS.fullmatch(address)
    if wanted is None:
        raise UserError(f"run={address}: give models:/NAME@ALIAS or models:/NAME/VERSION")
    uri = destination(None)
    client = connect_existing(uri, address)
    try:
        name, alias, version = wanted["name"], wanted["alias"], wanted["version"]
        found = (
            client.get_model_version_by_alias(name, alias)
            if alias
            else client.get_model_version(name, version)
        )
        source = client.get_model_version_download_uri(found.name, found.version)
        identity = repr((redact(uri), found.name, found.version, found.creation_timestamp, source))
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
    if not sizes:
        raise UserError(f"{address}: holds no detector; register one: lit-fedad register run=RUN name=NAME")
    for name, size in sizes.items():
        if size > _LARGEST:
            raise UserError(f"{address}: {name} has {size} bytes, and at most {_LARGEST} are fetched")


def _failure(what: str, cause: Exception, uri: str) -> UserError:
    return UserError(f"{what}: the model registry at {redact(uri)} says: {one_line(cause, uri)}")
