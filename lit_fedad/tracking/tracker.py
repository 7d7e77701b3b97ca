"""Experiment tracking with MLflow that training never waits for.

Every record is first written to a journal in the run's own folder; a daemon thread reads the journal and
delivers it to the tracking server in order. The journal is therefore the queue, the memory of a resumed run
and what :func:`deliver` sends later when the server was away:

```
<folder>/tracking/journal.jsonl    one record a line, in the order of logging
<folder>/tracking/sent.json        how much of it one server has: {"uri", "run_id", "delivered"}
<folder>/tracking/rejected.jsonl   records the server refused while it accepted others, with the cause
```

Sending a record twice leaves one copy on the server: records carry their own time, and a run is found again
by a tag that names its journal. So a crash at any point costs nothing but a repetition.

This is the only module that imports MLflow, and only where something is sent.
"""

import contextlib
import json
import logging
import math
import os
import re
import threading
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from lit_fedad.errors import UserError

_logger = logging.getLogger(__name__)

Record = dict[str, Any]

_SQLITE = "sqlite:///"
_DEFAULT_URI = f"{_SQLITE}mlflow.db"
_FOLDER_TAG = "lit_fedad.out"
_JOURNAL_TAG = "lit_fedad.journal"
_PROBE_TAG = "lit_fedad.probe"

# What one MLflow request takes, so that one record is one request.
_MAX_ITEMS = {"metrics": 1000, "params": 100, "tags": 100}
_MAX_TEXT = 6000
_MAX_DIGEST = 36

_TRIES = 3
_PAUSES_S = (0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)

# Set unless the user did: a request fails soon, and the retries are the sender's own.
_ENVIRONMENT = {
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_DISABLE_TELEMETRY": "true",
}


@dataclass(frozen=True)
class Delivery:
    """What has become of a run's records.

    Attributes:
        run_id: The MLflow run, or None if no server has been told of it yet.
        pending: Number of records that wait in the journal.
        error: Why records wait or were refused, in one line; None if all is well.
    """

    run_id: str | None
    pending: int
    error: str | None


class Tracker:
    """Logs one run; every call returns at once, whatever the server does.

    A tracker on a folder that already holds a journal continues its MLflow run: what is logged a second time
    (a parameter, a metric at the same step, an unchanged artifact) is ignored, so a resumed run may repeat
    itself.

    Args:
        folder: The run's folder; the journal lies in its subfolder ``tracking``.
        experiment: Name of the MLflow experiment, created at need.
        run_name: Name of the MLflow run.
        tags: Tags of the run.
        uri: Tracking URI; by default ``MLFLOW_TRACKING_URI``, or MLflow's own default ``sqlite:///mlflow.db``.
        enabled: With False every method does nothing.
        parent_run_id: MLflow run under which this one is listed.

    Example:
        >>> tracker = Tracker(Path("runs/1"), "bottle", "seed-0", enabled=False)
        >>> tracker.metrics({"image_auroc": 0.97}, step=1)
        >>> tracker.close()
        Delivery(run_id=None, pending=0, error=None)
    """

    def __init__(
        self,
        folder: Path,
        experiment: str,
        run_name: str,
        tags: Mapping[str, str] | None = None,
        uri: str | None = None,
        enabled: bool = True,
        parent_run_id: str | None = None,
    ) -> None:
        self._delivery = None if enabled else Delivery(None, 0, None)
        if not enabled:
            return
        self._folder = folder.resolve()
        self._journal = _Journal(self._folder)
        self._sender = _Sender(self._folder, _destination(uri))
        self._sender.save()
        self._journal.append(
            "start", {"experiment": experiment, "run_name": run_name, "journal": uuid.uuid4().hex}
        )
        parent = {"mlflow.parentRunId": parent_run_id} if parent_run_id else {}
        self._thread = threading.Thread(target=self._sender.run, name="tracking", daemon=True)
        self._thread.start()
        self.tags({_FOLDER_TAG: str(self._folder), **parent, **(tags or {})})

    @property
    def run_id(self) -> str | None:
        """Id of the MLflow run; None until a server has answered."""
        return self._sender.run_id if self._delivery is None else self._delivery.run_id

    def params(self, params: Mapping[str, object]) -> None:
        """Logs the configuration; nested mappings become dotted names, and a name keeps its first value."""
        self._log("params", {_name(key): _text(value) for key, value in _flatten(params)})

    def metrics(self, values: Mapping[str, float], step: int) -> None:
        """Logs one round's metrics in one request; values that are not finite are left out."""
        numbers = {_name(name): float(value) for name, value in values.items()}
        self._log("metrics", {name: value for name, value in numbers.items() if math.isfinite(value)}, step)

    def artifact(self, path: Path, folder: str = "") -> None:
        """Logs a file, or all that a directory holds; logged again it is sent again only if it changed.

        Args:
            path: File or directory. It is not copied and must stay until it is sent.
            folder: Folder among the run's artifacts; the top by default.
        """
        path = path.resolve()
        if self._delivery is None:
            self._log("artifact", {_artifact_name(path, self._folder): _fingerprint(path)}, folder)

    def dataset(
        self, name: str, source: str, digest: str, profile: Mapping[str, object], context: str
    ) -> None:
        """Logs a data set as an input of the run.

        Args:
            name: Name of the data set.
            source: Where it lies (path or URL).
            digest: Hash of its content; MLflow keeps the first 36 characters.
            profile: Facts about it (number of images, classes, ...).
            context: What it is used for (``training``, ``testing``, ...).
        """
        facts = {
            "source": source,
            "digest": digest[:_MAX_DIGEST],
            "profile": json.dumps(profile, default=str),
        }
        self._log("dataset", {name: facts}, context)

    def tags(self, tags: Mapping[str, str]) -> None:
        """Sets tags of the run; a later value replaces an earlier one."""
        self._log("tags", {_name(name): _text(value) for name, value in tags.items()})

    def close(self, status: str = "FINISHED", timeout_s: float = 15) -> Delivery:
        """Ends the run and waits a while for its last records to be sent.

        Args:
            status: ``FINISHED``, ``FAILED`` or ``KILLED``.
            timeout_s: Longest wait in seconds; what is not sent by then stays in the journal.

        Returns:
            What was delivered; a second call returns the same.
        """
        if self._delivery is None:
            self._journal.append("end", {"status": status})
            self._journal.close()
            self._sender.closing.set()
            self._sender.wake.set()
            self._thread.join(timeout_s)
            self._sender.abandoned.set()
            self._delivery = self._sender.delivery()
        return self._delivery

    def _log(self, kind: str, values: Mapping[str, Any], scope: str | int | None = None) -> None:
        if self._delivery is None and self._journal.append_new(kind, values, scope):
            self._sender.wake.set()


def log_files(
    files: Iterable[Path],
    folder: Path,
    experiment: str,
    tags: Mapping[str, str],
    uri: str | None,
    enabled: bool,
) -> Delivery:
    """Logs files as the artifacts of a run that is nothing but them; logged again, they replace those before.

    Args:
        files: What to log.
        folder: Where the journal lies; the run has its name.
        experiment: Name of the MLflow experiment.
        tags: Tags of the run.
        uri: Tracking URI, as for :class:`Tracker`.
        enabled: With False nothing is logged.

    Returns:
        What was delivered.
    """
    tracker = Tracker(folder, experiment, folder.name, tags, uri, enabled)
    for file in files:
        tracker.artifact(file)
    return tracker.close()


def amend(
    folder: Path, metrics: Mapping[str, float], step: int, files: Iterable[Path], place: str
) -> Delivery:
    """Adds to a run that has ended; does nothing for one that was not tracked.

    Args:
        folder: The run's folder.
        metrics: Further metrics; where one is known at this step, the new value stands beside the old one.
        step: Their step.
        files: Further artifacts; one of the same name replaces the old one.
        place: Their folder among the artifacts.

    Returns:
        What was delivered.
    """
    if not (_tracking_folder(folder) / "journal.jsonl").is_file():
        return Delivery(None, 0, None)
    journal = _Journal(folder.resolve())
    numbers = {_name(name): float(value) for name, value in metrics.items() if math.isfinite(value)}
    journal.append("metrics", numbers, step)
    for file in files:
        path = file.resolve()
        journal.append_new("artifact", {_artifact_name(path, folder.resolve()): _fingerprint(path)}, place)
    journal.close()
    return deliver(folder)


def deliver(folder: Path, uri: str | None = None) -> Delivery:
    """Sends what an earlier process left in a run's journal, and tries the refused records once more.

    Args:
        folder: The run's folder.
        uri: Tracking URI; by default ``MLFLOW_TRACKING_URI``, or the one the run was logged to. A server that
            has none of the run gets all of it.

    Returns:
        What was delivered.

    Raises:
        UserError: The folder holds no journal.
    """
    if not (_tracking_folder(folder) / "journal.jsonl").is_file():
        raise UserError(f"{folder}: no tracking/journal.jsonl to send; name the folder of a tracked run")
    sender = _Sender(folder.resolve(), _destination(uri, _read_sent(folder).get("uri")))
    sender.closing.set()
    sender.run()
    return sender.delivery()


def find_run_folder(run_id: str, uri: str | None = None) -> Path:
    """Returns the folder that an MLflow run was written to.

    Args:
        run_id: Id of the MLflow run.
        uri: Tracking URI, as for :class:`Tracker`.

    Raises:
        UserError: The server does not know the run, or the folder is not on this machine.
    """
    uri = _destination(uri)
    client = _reader(uri, f"MLflow run {run_id}")
    try:
        tags = client.get_run(run_id).data.tags
    except Exception as cause:
        raise UserError(f"MLflow run {run_id} was not found at {uri}: {_one_line(cause)}") from cause
    if _FOLDER_TAG not in tags:
        raise UserError(f"MLflow run {run_id} at {uri} has no tag {_FOLDER_TAG}: it is no run of lit-fedad")
    folder = Path(tags[_FOLDER_TAG])
    if not folder.is_dir():
        raise UserError(f"MLflow run {run_id} was written to {folder}, which is not there; name its folder")
    return folder


@dataclass(frozen=True)
class TrackedRun:
    """What MLflow knows of a run.

    Attributes:
        run_id: Its id.
        experiment_id: Id of its experiment.
        experiment: Name of its experiment.
        name: Its name.
        status: ``FINISHED``, ``RUNNING``, ``FAILED`` or ``KILLED``.
        started: When it began, in milliseconds.
        tags: Its tags.
        params: Its parameters.
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
        """Where its files were written; None for what is no run of lit-fedad."""
        return Path(self.tags[_FOLDER_TAG]) if _FOLDER_TAG in self.tags else None

    @property
    def parent(self) -> str | None:
        """Id of the run that it is listed under."""
        return self.tags.get("mlflow.parentRunId")


def tracked_runs(experiments: Sequence[str] = (), uri: str | None = None) -> list[TrackedRun]:
    """The runs of some experiments, or of all, in the order of their beginning.

    Args:
        experiments: Names of MLflow experiments; none for all.
        uri: Tracking URI, as for :class:`Tracker`.

    Raises:
        UserError: The server does not answer, or has no such experiment.
    """
    uri = _destination(uri)
    client = _reader(uri, "tracked runs")
    try:
        named = {experiment.name: experiment.experiment_id for experiment in client.search_experiments()}
        for name in experiments:
            if name not in named:
                raise UserError(f"experiment={name}: {uri} has none of this name, only {', '.join(named)}")
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
        raise UserError(f"{uri}: {_one_line(cause)}") from cause
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
    """Pairs (step, value) of one metric of a run, by step; the last value that was logged at a step."""
    points = _connect(_destination(uri)).get_metric_history(run_id, metric)
    return sorted({point.step: point.value for point in points}.items())


def fetch_artifacts(run_id: str, names: Sequence[str], into: Path, uri: str | None = None) -> Path:
    """Copies those of a run's artifacts that bear one of these names at the top, with all that folders hold.

    Args:
        run_id: Id of the MLflow run.
        names: Files or folders.
        into: An existing folder.
        uri: Tracking URI, as for :class:`Tracker`.

    Returns:
        ``into``.
    """
    client = _connect(_destination(uri))
    for artifact in client.list_artifacts(run_id):
        if artifact.path in names:
            client.download_artifacts(run_id, artifact.path, str(into))
    return into


def _reader(uri: str, what: str) -> Any:
    """A client for what is there already: it makes no database."""
    database = _database(uri)
    if database and not database.is_file():
        raise UserError(f"{what}: there is no database {database}; set MLFLOW_TRACKING_URI")
    return _connect(uri)


class _Journal:
    """The append-only file of records, which remembers what it holds.

    A record is ``{"kind", "scope", "values", "time"}``: its values are named, and a name is known within its
    kind and scope (the step of metrics, the folder of an artifact, the context of a data set).
    """

    def __init__(self, folder: Path) -> None:
        path = _tracking_folder(folder) / "journal.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab+")
        self._known: dict[tuple[str, str | int | None, str], Any] = {}
        self._file.seek(0)
        for line in _complete_lines(self._file):
            # A damaged line is the sender's to report.
            with contextlib.suppress(ValueError):
                self._remember(json.loads(line))
        # A killed process can leave half a line behind.
        self._file.truncate()

    def append_new(self, kind: str, values: Mapping[str, Any], scope: str | int | None) -> bool:
        """Appends those values that the journal does not hold yet; says whether there were any."""
        # MLflow would draw a second value of a metric at its step, and refuse that of a parameter.
        once = kind in ("metrics", "params")
        new = [
            (name, value)
            for name, value in values.items()
            if (kind, scope, name) not in self._known
            or (not once and self._known[kind, scope, name] != value)
        ]
        size = _MAX_ITEMS.get(kind, 1)
        for start in range(0, len(new), size):
            self.append(kind, dict(new[start : start + size]), scope)
        return bool(new)

    def append(self, kind: str, values: Mapping[str, Any], scope: str | int | None = None) -> None:
        record = {"kind": kind, "scope": scope, "values": values, "time": time.time_ns() // 1_000_000}
        self._remember(record)
        self._file.write(json.dumps(record).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()

    def _remember(self, record: Record) -> None:
        for name, value in record["values"].items():
            self._known[record["kind"], record["scope"], name] = value


class _Sender:
    """Reads a journal and delivers it, in order, for as long as it takes."""

    def __init__(self, folder: Path, uri: str) -> None:
        self.wake = threading.Event()  # something was appended
        self.closing = threading.Event()  # nothing more will be appended
        self.abandoned = threading.Event()  # nobody waits any longer: leave no trace
        self._folder = folder
        self._files = _tracking_folder(folder)
        self._uri = uri
        sent = _read_sent(folder)
        same = sent.get("uri") == uri
        self.run_id: str | None = sent.get("run_id") if same else None
        self._delivered: int = sent.get("delivered", 0) if same else 0
        self._position = 0
        self._client: Any = None
        self._error: str | None = None
        self._warned = False

    def run(self) -> None:
        """Delivers until closing with nothing left, or until closing with a server that keeps failing."""
        failures = 0
        while not self.abandoned.is_set():
            self.wake.clear()
            before = self._delivered
            last = self.closing.is_set()
            try:
                self._deliver_journal()
                if last:
                    self._deliver_rejected()
                    return
                failures = 0
                self.wake.wait()
            except Exception as cause:
                failures = failures + 1 if self._delivered == before else 1
                self._report(cause, failures)
                if last and failures >= _TRIES:
                    return
                pause = _PAUSES_S[min(failures, len(_PAUSES_S)) - 1]
                if last:
                    time.sleep(pause)
                else:
                    self.closing.wait(pause)

    def delivery(self) -> Delivery:
        with (self._files / "journal.jsonl").open("rb") as file:
            pending = sum(1 for _ in _complete_lines(file)) - self._delivered
        error = (self._error or f"{self._uri} has not answered yet") if pending else None
        rejected = self._files / "rejected.jsonl"
        if error is None and rejected.is_file():
            error = f"{self._uri} refused records, see {rejected}"
        return Delivery(self.run_id, max(pending, 0), error)

    def _deliver_journal(self) -> None:
        if self._client is None:
            self._client = self._open_run()
        with (self._files / "journal.jsonl").open("rb") as file:
            file.seek(self._position)
            for line in _complete_lines(file):
                self._deliver_line(line)
                if self.abandoned.is_set():
                    return
                self._position += len(line)
                self._delivered += 1
                self.save()
        self._error = None

    def _open_run(self) -> Any:
        """Finds or creates the run, and the position in the journal behind what the server has of it."""
        client = _connect(self._uri)
        with (self._files / "journal.jsonl").open("rb") as file:
            start = json.loads(file.readline())
            if self.run_id is None or not _is_active(client, self.run_id):
                self.run_id, self._delivered = _find_or_create(client, start), 0
                self.save()
                # The refused records are in the journal too, and all of it is sent.
                self._write(self._files / "rejected.jsonl", "")
            file.seek(0)
            self._position = sum(len(file.readline()) for _ in range(self._delivered))
        return client

    def _deliver_line(self, line: bytes) -> None:
        """Sends one record; one that fails while the server takes others is put aside."""
        cause: Exception | None = None
        for attempt in range(_TRIES):
            try:
                self._send(json.loads(line))
                return
            except Exception as error:
                cause = error
            # If this fails too, the server is at fault and not the record.
            self._client.set_tag(self.run_id, _PROBE_TAG, str(time.time_ns()))
            time.sleep(0.1 * 2**attempt)
        if not self.abandoned.is_set():
            entry = {"cause": _one_line(cause), "record": line.decode(errors="replace")}
            with (self._files / "rejected.jsonl").open("a") as file:
                file.write(json.dumps(entry) + "\n")
            _logger.warning(
                "tracking: %s refused a record, kept in %s: %s", self._uri, file.name, entry["cause"]
            )

    def _deliver_rejected(self) -> None:
        """Gives refused records one more chance."""
        path = self._files / "rejected.jsonl"
        if not path.is_file():
            return
        left = []
        for line in path.read_text().splitlines():
            try:
                self._send(json.loads(json.loads(line)["record"]))
            except Exception:
                left.append(line + "\n")
        self._write(path, "".join(left))

    def _send(self, record: Record) -> None:
        from mlflow import entities

        client, run_id = self._client, self.run_id
        values, scope, stamp = record["values"], record["scope"], record["time"]
        match record["kind"]:
            case "start":
                client.update_run(run_id, status="RUNNING", name=values["run_name"])
            case "params":
                client.log_batch(run_id, params=[entities.Param(*item) for item in values.items()])
            case "tags":
                client.log_batch(run_id, tags=[entities.RunTag(*item) for item in values.items()])
            case "metrics":
                points = [entities.Metric(name, value, stamp, scope) for name, value in values.items()]
                client.log_batch(run_id, metrics=points)
            case "artifact":
                for name in values:
                    path = self._folder / name
                    if path.is_dir():
                        client.log_artifacts(run_id, str(path), scope or None)
                    elif path.exists():
                        client.log_artifact(run_id, str(path), scope or None)
                    else:
                        _logger.warning("tracking: artifact %s is gone and was not sent", path)
            case "dataset":
                context = entities.InputTag("mlflow.data.context", scope)
                for name, facts in values.items():
                    source = json.dumps({"uri": facts["source"]})
                    dataset = entities.Dataset(
                        name, facts["digest"], "local", source, profile=facts["profile"]
                    )
                    client.log_inputs(run_id, [entities.DatasetInput(dataset, [context])])
            case "end":
                client.set_terminated(run_id, status=values["status"], end_time=stamp)
            case kind:
                raise ValueError(f"unknown kind of record: {kind}")

    def save(self) -> None:
        sent = {"uri": self._uri, "run_id": self.run_id, "delivered": self._delivered}
        self._write(self._files / "sent.json", json.dumps(sent))

    def _write(self, path: Path, text: str) -> None:
        """Replaces a file at one stroke; without text it goes."""
        if self.abandoned.is_set():
            return
        if not text:
            path.unlink(missing_ok=True)
        else:
            draft = path.with_name(f"{path.name}.{os.getpid()}")
            draft.write_text(text)
            draft.replace(path)

    def _report(self, cause: Exception, failures: int) -> None:
        self._error = f"{self._uri}: {_one_line(cause)}"
        # One failure is often a database that another run holds locked for a moment.
        if failures > 1 and not self._warned:
            self._warned = True
            _logger.warning("tracking: %s; records are kept in %s and sent later", self._error, self._files)


def _connect(uri: str) -> Any:
    """Returns a quiet MLflow client; imports MLflow."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    from filelock import FileLock
    from mlflow import MlflowClient

    for name in ("mlflow", "alembic"):
        logging.getLogger(name).setLevel(logging.ERROR)
    database = _database(uri)
    if database is None:
        return MlflowClient(tracking_uri=uri)
    # MLflow creates the tables here. Two processes that do so at once, or one that is killed meanwhile, leave a
    # database that no later run can use: it is made beside its place, one at a time, and moved there complete.
    database.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{database}-lock"):
        if not database.exists():
            draft = database.with_name(f"{database.name}-draft")
            draft.unlink(missing_ok=True)
            MlflowClient(tracking_uri=f"{_SQLITE}{draft}")
            draft.replace(database)
        return MlflowClient(tracking_uri=uri)


def _is_active(client: Any, run_id: str) -> bool:
    try:
        return client.get_run(run_id).info.lifecycle_stage == "active"
    except Exception as cause:
        if getattr(cause, "error_code", None) == "RESOURCE_DOES_NOT_EXIST":
            return False
        raise


def _find_or_create(client: Any, start: Record) -> str:
    """Returns the id of the journal's run; an answer that was lost on the way makes no second run."""
    name, identity = start["values"]["experiment"], start["values"]["journal"]
    experiment = client.get_experiment_by_name(name)
    # Where two runs create it at once, the one that fails finds it at its next try.
    # The tag makes MLflow's pages open as those of model training, not of language models.
    tags = {"mlflow.experimentKind": "custom_model_development"}
    experiment_id = experiment.experiment_id if experiment else client.create_experiment(name, tags=tags)
    found = client.search_runs([experiment_id], f"tags.`{_JOURNAL_TAG}` = '{identity}'")
    if found:
        return found[0].info.run_id
    run = client.create_run(
        experiment_id, start["time"], {_JOURNAL_TAG: identity}, start["values"]["run_name"]
    )
    return run.info.run_id


def _destination(uri: str | None, fallback: str | None = None) -> str:
    """Returns the tracking URI; that of a database file does not depend on the working directory."""
    uri = uri or os.environ.get("MLFLOW_TRACKING_URI") or fallback or _DEFAULT_URI
    database = _database(uri)
    return f"{_SQLITE}{database.resolve()}" if database else uri


def _database(uri: str) -> Path | None:
    """Returns the file of an SQLite database; None for any other server."""
    return Path(uri.removeprefix(_SQLITE)) if uri.startswith(_SQLITE) else None


def _tracking_folder(folder: Path) -> Path:
    return folder / "tracking"


def _read_sent(folder: Path) -> dict[str, Any]:
    try:
        return json.loads((_tracking_folder(folder) / "sent.json").read_text())
    except (FileNotFoundError, ValueError):
        return {}


def _complete_lines(file: BinaryIO) -> Iterator[bytes]:
    """Yields the lines from the file's position on; before a last line without its end it stops and stays."""
    while (line := file.readline()).endswith(b"\n"):
        yield line
    file.seek(-len(line), os.SEEK_CUR)


def _flatten(params: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    for key, value in params.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _name(text: str) -> str:
    """Replaces what MLflow does not allow in a name."""
    return re.sub(r"[^\w.\-/ ]", "_", text)[:250]


def _text(value: object) -> str:
    text = str(value)
    return text if len(text) <= _MAX_TEXT else text[: _MAX_TEXT - 1] + "…"


def _one_line(cause: Exception | None) -> str:
    return (f"{cause}".strip() or repr(cause)).splitlines()[0]


def _artifact_name(path: Path, folder: Path) -> str:
    """Relative inside the run's folder, so that the folder can be moved before it is sent."""
    return path.relative_to(folder).as_posix() if path.is_relative_to(folder) else str(path)


def _fingerprint(path: Path) -> str:
    """Tells a changed file or directory from an unchanged one without reading it."""
    files = [path, *path.rglob("*")] if path.is_dir() else [path]
    stats = [file.stat() for file in files if file.is_file()]
    size = sum(stat.st_size for stat in stats)
    return f"{len(stats)} files, {size} bytes, {max((stat.st_mtime_ns for stat in stats), default=0)}"
