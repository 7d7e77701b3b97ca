"""What a run logs: parameters, metrics, artifacts, data sets and tags, without waiting for the server."""

import uuid
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from lit_fedad.core.nested import flatten
from lit_fedad.tracking.journal import (
    Journal,
    artifact_values,
    dataset_values,
    journal_file,
    metric_values,
    text_values,
)
from lit_fedad.tracking.sender import Delivery, Sender, deliver
from lit_fedad.tracking.server import FOLDER_TAG, destination


class Tracker:
    """The log of one run; every call but `wait_for_id` and `close` returns at once, whatever the server does.

    A tracker on a folder that already holds a journal continues its MLflow run: what is logged a second time
    (a parameter, a metric at the same step, an unchanged artifact) is ignored, so a resumed run may repeat
    itself.

    Args:
        folder: The run's folder; the journal lies in its subfolder ``tracking``.
        experiment: Name of the MLflow experiment, created if there is none.
        run_name: Name of the MLflow run.
        tags: Tags of the run.
        uri: Tracking URI; None for ``MLFLOW_TRACKING_URI``, or MLflow's own default ``sqlite:///mlflow.db``.
        enabled: Whether anything is logged; if not, every method does nothing.
        parent_run_id: MLflow run under which this one is listed.

    Example:
        >>> tracker = Tracker(Path("runs/1"), "bottle", "seed-0", enabled=False)
        >>> tracker.metrics({"image_auroc": 0.97}, step=1)
        >>> tracker.close()
        Delivery(run_id=None, pending=0, error=None, refused=0)
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
        self._journal = Journal(self._folder)
        self._sender = Sender(self._folder, server := destination(uri))
        # On a busy machine the first records wait half a minute until a new database is created.
        self._patience_s = 120 if server.startswith("sqlite:") else 15
        self._sender.save()
        self._journal.append(
            "start", {"experiment": experiment, "run_name": run_name, "journal": uuid.uuid4().hex}
        )
        self._sender.start()
        parent = {"mlflow.parentRunId": parent_run_id} if parent_run_id else {}
        self.tags({FOLDER_TAG: str(self._folder), **parent, **(tags or {})})

    @property
    def run_id(self) -> str | None:
        """Id of the MLflow run; None until a server has answered."""
        return self._sender.run_id if self._delivery is None else self._delivery.run_id

    def wait_for_id(self) -> str | None:
        """Returns the id of the MLflow run, for which it waits as long as `close`; None if the server has failed."""
        return self.run_id if self._delivery is not None else self._sender.wait_for_id(self._patience_s)

    def params(self, params: Mapping[str, object]) -> None:
        """Logs the configuration, nested mappings under dotted names; a name keeps its first value."""
        self._log("params", text_values(flatten(params)))

    def metrics(self, values: Mapping[str, float], step: int) -> None:
        """Logs the metrics of one step in one request, without values that are not finite."""
        self._log("metrics", metric_values(values), step)

    def artifact(self, path: Path, folder: str = "") -> None:
        """Logs a file, or all files in a directory; if it is logged again, it is sent again only if it has changed.

        It is not copied, so it must not be removed before it is sent.
        """
        if self._delivery is None:
            self._log("artifact", artifact_values(path, self._folder), folder)

    def dataset(
        self, name: str, source: str, digest: str, profile: Mapping[str, object], context: str
    ) -> None:
        """Logs a data set as an input of the run, with a profile of it and its use as context (``training``)."""
        self._log("dataset", dataset_values(name, source, digest, profile), context)

    def tags(self, tags: Mapping[str, str]) -> None:
        """Sets tags of the run; a later value replaces an earlier one.

        In a value, the text `RUN_ID` stands for the id of the MLflow run.
        """
        self._log("tags", text_values(tags))

    def close(self, status: str = "FINISHED", timeout_s: float | None = None) -> Delivery:
        """Ends the run and waits a while for its last records to be sent.

        Args:
            status: ``FINISHED``, ``FAILED`` or ``KILLED``.
            timeout_s: Longest wait in seconds; what is not sent by then stays in the journal. None for 15, and for 120
                where the server is a database file, which always answers.

        Returns:
            State of the delivery; a second call returns the same.
        """
        if self._delivery is None:
            self._journal.append("end", {"status": status})
            self._journal.close()
            try:
                self._delivery = self._sender.finish(self._patience_s if timeout_s is None else timeout_s)
            except KeyboardInterrupt:  # the process was asked to end a second time: it waits no longer
                self._delivery = self._sender.finish(0)
                raise
        return self._delivery

    def _log(self, kind: str, values: Mapping[str, Any], scope: str | int | None = None) -> None:
        if self._delivery is None and self._journal.append_new(kind, values, scope):
            self._sender.wake()


def amend(
    folder: Path, metrics: Mapping[str, float], step: int, files: Iterable[Path], place: str
) -> Delivery:
    """Adds metrics and artifacts to a run that has ended; does nothing for a run that was not tracked.

    If a metric has a value at this step already, MLflow shows both; a file replaces the artifact of its name. Files
    outside of the run's folder are not sent.

    Args:
        folder: The run's folder.
        metrics: The metrics by name.
        step: Step of the metrics.
        files: The files.
        place: Folder among the run's artifacts for the files.
    """
    if not journal_file(folder).is_file():
        return Delivery(None, 0, None)
    journal = Journal(folder)
    journal.append("metrics", metric_values(metrics), step)
    for file in files:
        if file.resolve().is_relative_to(folder.resolve()):
            journal.append_new("artifact", artifact_values(file, folder), place)
    journal.close()
    return deliver(folder)
