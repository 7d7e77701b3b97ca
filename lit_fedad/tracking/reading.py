"""Reads from the tracking server what it knows of runs: their folders, parameters, metrics and artifacts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lit_fedad.core.errors import UserError
from lit_fedad.core.files import long_path_in_one_line
from lit_fedad.core.text import redact
from lit_fedad.tracking.server import (
    FOLDER_TAG,
    connect,
    connect_existing,
    destination,
    is_database,
    one_line,
)

_LARGEST = 1e300  # of a value in a figure, whose axis is a little longer
_MOST_ARTIFACTS, _MOST_BYTES = 10_000, 2**30  # fetched of one run: far more than a run logs


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
        """Folder to which the run's files were written; None for a run that is not lit-fedad's."""
        return Path(self.tags[FOLDER_TAG]) if FOLDER_TAG in self.tags else None

    @property
    def parent(self) -> str | None:
        """Id of the run under which this one is listed; None if there is none."""
        return self.tags.get("mlflow.parentRunId")


def find_run_folder(run_id: str) -> Path:
    """Returns the folder to which an MLflow run was written.

    A database file is the user's own and is trusted. A folder that another server names must lie in ``outputs`` of the
    working directory, since anybody who may write to the server could name any folder.

    Raises:
        UserError: The server does not know the run, or the folder is not on this machine or may not be trusted.
    """
    uri = destination(None)
    client = connect_existing(uri, f"MLflow run {run_id}")
    try:
        tags = client.get_run(run_id).data.tags
    except Exception as cause:
        raise UserError(
            f"MLflow run {run_id} was not found at {redact(uri)}: {one_line(cause, uri)}"
        ) from None  # the cause may hold the password
    if not tags.get(FOLDER_TAG):
        raise UserError(
            f"MLflow run {run_id} at {redact(uri)} has no tag {FOLDER_TAG}: it is no run of lit-fedad"
        )
    folder = Path(tags[FOLDER_TAG])
    if not is_database(uri) and not folder.resolve().is_relative_to(Path("outputs").resolve()):
        raise UserError(
            f"MLflow run {run_id}: the server says that it was written to {folder}, which is not in outputs/; if you"
            f" trust that folder, give run={folder}"
        )
    with long_path_in_one_line():
        there = folder.is_dir()
    if not there:
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
        ids = {experiment.name: experiment.experiment_id for experiment in client.search_experiments()}
        for name in experiments:
            if name not in ids:
                raise UserError(
                    f"experiment={name}: {redact(uri)} has none of this name, only {', '.join(ids)}"
                )
        names = {ids[name]: name for name in experiments or ids}
        runs, token = [], None
        while names:
            page = client.search_runs(list(names), order_by=["attributes.start_time"], page_token=token)
            runs += list(page)
            if not (token := page.token):
                break
    except UserError:
        raise
    except Exception as cause:
        raise UserError(f"{redact(uri)}: {one_line(cause, uri)}") from None  # the cause may hold the password
    return [
        TrackedRun(
            run.info.run_id,
            run.info.experiment_id,
            names[run.info.experiment_id],
            run.info.run_name or run.info.run_id,
            run.info.status,
            run.info.start_time,
            {key: value for key, value in run.data.tags.items() if value is not None},
            run.data.params,
            run.data.metrics,
        )
        for run in runs
    ]


def metric_history(run_id: str, metric: str, uri: str | None = None) -> list[tuple[int, float]]:
    """Returns the values of one metric of a run over its steps.

    Returns:
        Pairs (step, value), steps ascending; if a step has several values, the one that was logged last. Values that no
        figure can show are left out: what is no number, is not finite, or is beyond 1e300.

    Raises:
        UserError: The server does not answer, or refuses.
    """
    uri = destination(uri)
    try:
        points = connect(uri).get_metric_history(run_id, metric)
    except Exception as cause:
        raise UserError(f"{redact(uri)}: {one_line(cause, uri)}") from None  # the cause may hold the password
    # A database has what was written to it, such as text in a column of numbers.
    return sorted({point.step: point.value for point in points if _is_shown(point)}.items())


def _is_shown(point: Any) -> bool:
    whole, number = isinstance(point.step, int), isinstance(point.value, int | float)
    return whole and number and abs(point.value) < _LARGEST  # not true of NaN


def fetch_artifacts(run_id: str, names: Sequence[str], into: Path, uri: str | None = None) -> Path:
    """Copies some of a run's artifacts from the server; of a folder, all files in it.

    Raises:
        UserError: The artifacts cannot be read from the place that the server names, or there are too many or too large
            ones.
    """
    uri = destination(uri)
    try:
        client = connect(uri)
        wanted = [artifact for artifact in client.list_artifacts(run_id) if artifact.path in names]
        _refuse_many(client, run_id, wanted)
        for artifact in wanted:
            client.download_artifacts(run_id, artifact.path, str(into))
    except Exception as cause:  # raised by MLflow or by its store of artifacts
        raise UserError(f"{redact(uri)}: its files cannot be fetched: {one_line(cause, uri)}") from None
    return into


def _refuse_many(client: Any, run_id: str, artifacts: Sequence[Any]) -> None:
    """Refuses artifacts that would fill the disk, or whose listing has no end."""
    waiting, entries, size = list(artifacts), 0, 0
    while waiting:
        artifact = waiting.pop()
        entries += 1
        size += artifact.file_size or 0
        if entries > _MOST_ARTIFACTS or size > _MOST_BYTES:
            raise UserError(f"run {run_id}: more than {_MOST_ARTIFACTS} files or {_MOST_BYTES} bytes")
        if artifact.is_dir:
            waiting += client.list_artifacts(run_id, artifact.path)
