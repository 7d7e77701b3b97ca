"""The MLflow server: its address, a client for it, and a run on it that takes records.

This is the only module that imports MLflow, and it does so only when a function is called. If a server does not answer
or refuses a request, MLflow's own exceptions are raised.
"""

import json
import logging
import os
import re
import threading
import time
from concurrent.futures import Future, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lit_fedad.core.errors import UserError
from lit_fedad.core.files import forbidden_in_one_line, within
from lit_fedad.core.text import HIDDEN, redact
from lit_fedad.tracking.journal import Record

_logger = logging.getLogger(__name__)

FOLDER_TAG = "lit_fedad.out"
"""Tag that names the folder to which a run was written."""

RUN_ID = "{run_id}"
"""Placeholder in a tag's value for the id of its MLflow run, which the server may not have given yet."""

_VIEW = "lit_fedad"  # name of the view of an experiment's runs that shows `_COLUMNS`
_COLUMNS = (
    "metrics.`i_auroc/mean`",
    "metrics.`miss_rate/mean`",
    "metrics.`false_alarm_rate/mean`",
    "metrics.`pro/mean`",
    "metrics.`accuracy/mean`",
    "tags.`method`",
    "tags.`data`",
)
_EXPERIMENT_TAGS = {
    # MLflow then shows its pages for model training, not those for language models.
    "mlflow.experimentKind": "custom_model_development",
    # A view of the page of runs: without one the page shows no metric.
    f"mlflow.sharedViewState.{_VIEW}": json.dumps(
        {
            "name": "results",
            "createdAt": 0,
            "updatedAt": 0,
            "state": json.dumps({"selectedColumns": _COLUMNS}),
        }
    ),
}

_JOURNAL_TAG = "lit_fedad.journal"  # identity of the journal that a run belongs to
_PROBE_TAG = "lit_fedad.probe"  # set to find out whether the server works

_PATIENCE_S = 8
"""Longest wait for the answer of a database, in seconds."""

_SQLITE = "sqlite:///"
_DEFAULT_URI = f"{_SQLITE}mlflow.db"

# Variables that are set unless the user has set them. A request then fails soon, and the sender repeats it.
_ENVIRONMENT = {
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
}


def destination(uri: str | None) -> str:
    """Returns the tracking URI: the given one, ``MLFLOW_TRACKING_URI``, or MLflow's own default ``sqlite:///mlflow.db``.

    The URI of a database file is made absolute. A URI that was read from a run's files has no user name and password:
    ``MLFLOW_TRACKING_URI`` comes before it, and MLflow takes them from the environment.
    """
    redacted = None
    if uri and f"{HIDDEN}@" in uri:
        uri, redacted = None, uri
    uri = uri or os.environ.get("MLFLOW_TRACKING_URI") or redacted or _DEFAULT_URI
    uri = uri.replace(f"{HIDDEN}@", "")
    database = _database(uri)
    return f"{_SQLITE}{database.resolve()}" if database else uri


def connect(uri: str) -> Any:
    """Returns an MLflow client that prints nothing; creates the database of an SQLite URI if there is none.

    Raises:
        UserError: If the database is no regular file, or this account may not read it, or does not answer in time.
    """
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    from filelock import FileLock
    from mlflow import MlflowClient

    for name in ("mlflow", "alembic"):
        # MLflow would print the traceback of an error that it also raises, and which is told in one line here.
        logging.getLogger(name).setLevel(logging.CRITICAL)
    database = _database(uri)
    if database is None:
        return _client_of_server(uri)
    # MLflow creates the tables here. Two processes that do so at once, or one that is killed meanwhile, would leave a
    # database that no later run can use. So one process at a time creates it under another name, and then renames it.
    database.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{database}-lock"):
        if not database.exists():
            draft = database.with_name(f"{database.name}-draft")
            draft.unlink(missing_ok=True)
            MlflowClient(tracking_uri=f"{_SQLITE}{draft}")
            draft.replace(database)
        # MLflow would try for two minutes to open a file that it may not.
        if not database.is_file():
            raise UserError(f"{database}: is no file of a database; set MLFLOW_TRACKING_URI")
        with forbidden_in_one_line(database), database.open("rb"):
            pass
        return MlflowClient(tracking_uri=uri)


def _client_of_server(uri: str) -> Any:
    """Returns a client of an MLflow server, or of a database server that answers within `_PATIENCE_S`.

    Raises:
        UserError: If the database does not answer in time.
    """
    from mlflow import MlflowClient

    if uri.startswith(("http:", "https:")):
        return MlflowClient(tracking_uri=uri)  # sends no request yet, and later ones have a time limit
    client: Future[Any] = Future()

    def open_client() -> None:
        try:
            client.set_result(MlflowClient(tracking_uri=uri))
        except Exception as error:  # raised in the caller's thread
            client.set_exception(error)

    threading.Thread(target=open_client, daemon=True).start()  # an executor would wait for it at the end
    wait([client], _PATIENCE_S)
    if not client.done():
        raise UserError(
            f"{redact(uri)}: the database does not answer within {_PATIENCE_S} seconds; is it running?"
        )
    return client.result()


def connect_existing(uri: str, what: str) -> Any:
    """Returns an MLflow client for a server or database that exists; errors begin with `what`.

    Raises:
        UserError: There is no such database, or it cannot be opened: it is locked, is no database of MLflow, or is of
            another version.
    """
    database = _database(uri)
    if database and not database.is_file():
        raise UserError(f"{what}: there is no database {database}; set MLFLOW_TRACKING_URI")
    try:
        return connect(uri)
    except UserError:
        raise
    except Exception as cause:
        raise UserError(f"{what}: {redact(uri)} cannot be opened: {one_line(cause, uri)}") from None


@dataclass(frozen=True)
class ServerRun:
    """A run on the tracking server.

    Attributes:
        run_id: Id of the MLflow run.
        experiment_id: Id of its experiment.
    """

    client: Any
    run_id: str
    experiment_id: str

    def send(self, record: Record, folder: Path) -> None:
        """Sends one record, which `lit_fedad.tracking.journal.read_record` has read, in one request.

        Raises:
            Exception: The server did not answer, or refused the record.
        """
        from mlflow import entities

        client, run_id = self.client, self.run_id
        values, scope, stamp = record["values"], record["scope"], record["time"]
        match record["kind"]:
            case "start":
                client.update_run(run_id, status="RUNNING", name=values["run_name"])
            case "params":
                client.log_batch(run_id, params=[entities.Param(*item) for item in values.items()])
            case "tags":
                tags = {name: value.replace(RUN_ID, run_id) for name, value in values.items()}
                client.log_batch(run_id, tags=[entities.RunTag(*item) for item in tags.items()])
            case "metrics":
                points = [entities.Metric(name, value, stamp, scope) for name, value in values.items()]
                client.log_batch(run_id, metrics=points)
            case "artifact":
                for name in values:
                    if not (folder / name).exists():
                        _logger.warning("tracking: artifact %s is gone and was not sent", folder / name)
                        continue
                    path = within(folder, name)
                    if path.is_dir():
                        client.log_artifacts(run_id, str(path), scope or None)
                    else:
                        client.log_artifact(run_id, str(path), scope or None)
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

    def probe(self) -> None:
        """Sends a request that every working server accepts."""
        self.client.set_tag(self.run_id, _PROBE_TAG, str(time.time_ns()))


def open_run(client: Any, run_id: str | None, start: Record) -> ServerRun:
    """Opens the run of a journal on the server, and creates it if the server does not have it.

    Args:
        client: MLflow's client.
        run_id: Id under which an earlier process knew the run, if any.
        start: The journal's first record.

    Returns:
        The run. It has another id if the run of that id was deleted or belongs to another journal: a folder may come
        from anybody, and could name any run.
    """
    info = (run_id and _active(client, run_id, start)) or _find_or_create(client, start)
    return ServerRun(client, info.run_id, info.experiment_id)


def _active(client: Any, run_id: str, start: Record) -> Any | None:
    """Returns the information about a run if it is active and belongs to the journal; else None."""
    try:
        run = client.get_run(run_id)
    except Exception as cause:
        # The id comes from a file of the run's folder: it may be none.
        if getattr(cause, "error_code", None) in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
            return None
        raise
    same_journal = run.data.tags.get(_JOURNAL_TAG) == start["values"]["journal"]
    return run.info if same_journal and run.info.lifecycle_stage == "active" else None


def _find_or_create(client: Any, start: Record) -> Any:
    """Returns the information about the journal's run; a run whose creation was not answered is found by its tag."""
    name, identity = start["values"]["experiment"], start["values"]["journal"]
    if experiment := client.get_experiment_by_name(name):
        experiment_id = experiment.experiment_id
        for key in _EXPERIMENT_TAGS.keys() - experiment.tags.keys():
            client.set_experiment_tag(experiment_id, key, _EXPERIMENT_TAGS[key])
    else:  # if two runs create it at once, the one that fails finds it in its next attempt
        experiment_id = client.create_experiment(name, tags=_EXPERIMENT_TAGS)
    runs = client.search_runs([experiment_id], f"tags.`{_JOURNAL_TAG}` = '{identity}'")
    if runs:
        return runs[0].info
    tags = {_JOURNAL_TAG: identity}
    return client.create_run(experiment_id, start["time"], tags, start["values"]["run_name"]).info


def results_page(uri: str, experiment_id: str) -> str:
    """Returns where a browser shows the results of an experiment's runs side by side.

    Example:
        >>> results_page("http://host:5000", "3")
        'http://host:5000/#/experiments/3/runs?viewStateShareKey=lit_fedad'
    """
    # Without the name of the view, MLflow 3.17 first shows an empty overview of language models.
    page = f"/#/experiments/{experiment_id}/runs?viewStateShareKey={_VIEW}"
    if uri.startswith(("http:", "https:")):
        return f"{uri.rstrip('/')}{page}"
    is_default = uri == f"{_SQLITE}{Path('mlflow.db').resolve()}"
    return f"mlflow ui{'' if is_default else f' --backend-store-uri {uri}'}, then http://127.0.0.1:5000{page}"


def list_files(address: str, uri: str) -> dict[str, int]:
    """Returns the sizes in bytes of the files, but not of the folders, at an address of artifacts, by name."""
    from mlflow.artifacts import list_artifacts

    artifacts = list_artifacts(artifact_uri=address, tracking_uri=uri)
    return {Path(file.path).name: file.file_size or 0 for file in artifacts if not file.is_dir}


def fetch_file(address: str, into: Path, uri: str) -> None:
    """Copies an artifact into a folder, and makes the folder if it is missing."""
    from mlflow.artifacts import download_artifacts

    into.mkdir(parents=True, exist_ok=True)
    download_artifacts(artifact_uri=address, dst_path=str(into), tracking_uri=uri)


def is_database(uri: str) -> bool:
    """Tells whether a tracking URI is a database file on this machine."""
    return _database(uri) is not None


def one_line(cause: Exception, uri: str) -> str:
    """Returns the first line of an exception's message, or its name if it has none, without the user of the URI."""
    line = (f"{cause}".strip() or repr(cause)).splitlines()[0]
    # The text about a failed connection lists the cause of every layer; the last one says what is wrong.
    if "Max retries exceeded" in line:
        if causes := re.findall(r"\[Errno -?\d+\] ([^\"')]+)", line):
            line = f"cannot be reached: {causes[-1]}"
        elif causes := re.findall(r"([^\"':]{8,})[\"']\)", line):
            line = f"does not work: {causes[-1].strip()}"
    return redact(line, uri)


def _database(uri: str) -> Path | None:
    """Returns the file of an SQLite database; None for any other server."""
    return Path(uri.removeprefix(_SQLITE)) if uri.startswith(_SQLITE) else None
