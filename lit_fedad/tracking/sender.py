"""Delivers a journal to the tracking server, in the background or later."""

import json
import logging
import os
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

from lit_fedad.core.errors import UserError
from lit_fedad.core.extras import install
from lit_fedad.core.files import atomic, open_to_append, stored_bytes
from lit_fedad.core.plain_values import plain_json
from lit_fedad.core.text import redact, without_user
from lit_fedad.tracking.journal import (
    REJECTED,
    check_journal,
    complete_lines,
    journal_file,
    read_record,
    read_start,
    tracking_folder,
)
from lit_fedad.tracking.server import ServerRun, connect, destination, one_line, open_run, results_page

_logger = logging.getLogger(__name__)

_TRIES = 3  # attempts to send one record, and attempts at the end of a run if the server fails
_PAUSES_S = (0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)  # after the first failure, the second, and so on


@dataclass(frozen=True)
class Delivery:
    """State of the delivery of a run's records.

    Attributes:
        run_id: Id of the MLflow run; None if no server has created it yet.
        pending: Number of records in the journal that have not been delivered yet.
        error: Why records are pending or were refused, in one line; None if there are no such records.
        refused: Number of records that the server refused while it accepted others.
    """

    run_id: str | None
    pending: int
    error: str | None
    refused: int = 0

    @property
    def kept(self) -> int:
        """Number of records that the server does not have; the run's folder keeps them."""
        return self.pending + self.refused


def deliver(folder: Path) -> Delivery:
    """Sends the records that an earlier process left in a run's journal, and tries the refused records once more.

    The records go to the server that the user has configured: ``MLFLOW_TRACKING_URI``, or MLflow's own default. If the
    folder names another server, nothing is sent to it. A server that does not have the run receives all records.

    Raises:
        UserError: The folder holds no journal.
    """
    check_journal(folder)
    if not journal_file(folder).is_file():
        raise UserError(f"{folder}: no tracking/journal.jsonl to send; name the folder of a tracked run")
    sender = Sender(folder.resolve(), destination(None))
    server = _read_sent(folder).get("uri")
    if server and "MLFLOW_TRACKING_URI" not in os.environ and server != without_user(destination(None)):
        return sender.wait(
            f"the folder names the server {server}; set MLFLOW_TRACKING_URI to send its records"
        )
    return sender.drain() if find_spec("mlflow") else sender.wait(f"MLflow is not here: {install('train')}")


def where_compared(folders: Iterable[Path]) -> list[tuple[str, str]]:
    """Returns where MLflow shows runs side by side, for `Display.where_next`; no line if no server has one of them."""
    for sent in map(_read_sent, folders):
        if {"uri", "experiment_id"} <= sent.keys():
            return [("compare runs", results_page(sent["uri"], sent["experiment_id"]))]
    return []


class Sender:
    """Reads one journal, sends its records in order and counts those that were delivered.

    Args:
        folder: The run's folder.
        uri: Tracking URI of the server.
    """

    def __init__(self, folder: Path, uri: str) -> None:
        self._appended = threading.Event()  # there may be new records
        self._answered = threading.Event()  # the server has opened the run, or has failed
        self._closing = threading.Event()  # no further record will be appended
        self._abandoned = threading.Event()  # the caller stopped waiting: no file is changed from now on
        self._thread = threading.Thread(target=self._deliver, name="tracking", daemon=True)
        self._folder = folder
        self._files = tracking_folder(folder)
        self._uri, self._shown = uri, redact(uri)
        sent = _read_sent(folder)
        same_server = sent.get("uri") == without_user(uri)
        self.run_id: str | None = sent.get("run_id") if same_server else None
        self._experiment_id: str | None = sent.get("experiment_id") if same_server else None
        self._delivered: int = max(sent.get("delivered", 0), 0) if same_server else 0
        self._position = 0  # in the journal, behind the delivered records, in bytes
        self._error: str | None = None
        self._warned = self._warned_of_refusal = False

    def start(self) -> None:
        """Starts to deliver in a daemon thread; the journal must have its first record."""
        self._thread.start()

    def wake(self) -> None:
        """Announces that records were appended to the journal."""
        self._appended.set()

    def wait_for_id(self, timeout_s: float) -> str | None:
        """Waits for the server's first answer; returns the run's id, or None if the server failed or is too slow.

        Args:
            timeout_s: Longest wait in seconds.
        """
        if self.run_id is None:
            self._answered.wait(timeout_s)
        return self.run_id

    def finish(self, timeout_s: float) -> Delivery:
        """Waits until the thread has delivered all records, or has given up.

        Args:
            timeout_s: Longest wait in seconds; what is not sent by then stays in the journal.
        """
        self._closing.set()
        self._appended.set()
        self._thread.join(timeout_s)
        self._abandoned.set()
        return self._delivery()

    def drain(self) -> Delivery:
        """Delivers the journal in the caller's thread."""
        self._closing.set()
        self._deliver()
        return self._delivery()

    def wait(self, cause: str) -> Delivery:
        """Leaves all records in the journal, and gives `cause` as the delivery's error."""
        self._error = cause
        return self._delivery()

    def save(self) -> None:
        """Writes the server's address, without its user, and the number of delivered records to ``sent.json``."""
        sent = {
            "uri": without_user(self._uri),
            "run_id": self.run_id,
            "experiment_id": self._experiment_id,
            "delivered": self._delivered,
        }
        self._replace(self._files / "sent.json", json.dumps(sent).encode())

    def _deliver(self) -> None:
        """Delivers records until the journal is closed and either all are delivered or the server keeps failing."""
        run: ServerRun | None = None
        failures = 0
        while not self._abandoned.is_set():
            self._appended.clear()
            delivered_before = self._delivered
            closing = self._closing.is_set()
            try:
                run = run or self._open_run()
                self._answered.set()
                self._deliver_journal(run)
                if closing:
                    self._deliver_rejected(run)
                    return
                failures = 0
                self._appended.wait()
            except Exception as cause:
                self._answered.set()
                failures = failures + 1 if self._delivered == delivered_before else 1
                self._report(cause, failures)
                if closing and failures >= _TRIES:
                    return
                pause = _PAUSES_S[min(failures, len(_PAUSES_S)) - 1]
                if closing:
                    time.sleep(pause)
                else:
                    self._closing.wait(pause)

    def _delivery(self) -> Delivery:
        """Describes the state of the delivery, by the files in the run's folder."""
        journal = journal_file(self._folder)
        try:
            with journal.open("rb") as file:
                records = sum(1 for _ in complete_lines(file))
        except FileNotFoundError:  # the run's folder was removed; the run itself reports that
            return Delivery(self.run_id, 0, f"{journal} is gone", 0)
        refused = len(stored_bytes(self._rejected).splitlines()) if self._rejected.is_file() else 0
        # An account of more records than there are is damaged.
        pending = records - (self._delivered if self._delivered <= records else 0)
        error = None
        if pending > 0:
            error = self._error or f"{self._shown} has not answered yet"
        elif refused:  # by this delivery, or by an earlier one if the server does not answer now
            error = self._error or f"{self._shown} refused records, see {self._rejected}"
        return Delivery(self.run_id, pending, error, refused)

    @property
    def _rejected(self) -> Path:
        return self._files / REJECTED

    def _open_run(self) -> ServerRun:
        """Opens the run on the server, and finds the position in the journal behind the records that the server has."""
        with journal_file(self._folder).open("rb") as file:
            client = connect(self._uri)
            if self._abandoned.is_set():  # a later delivery may be creating the run now
                raise UserError("nobody waits for this delivery any more")
            run = open_run(client, self.run_id, read_start(file))
            self._experiment_id = run.experiment_id
            if run.run_id != self.run_id:
                self.run_id, self._delivered = run.run_id, 0
                self.save()
                # The journal holds the refused records too, and is sent from its beginning.
                self._replace(self._rejected, b"")
            file.seek(0)
            lengths = [len(line) for line in islice(complete_lines(file), self._delivered)]
            if len(lengths) < self._delivered:  # a damaged account: all records are sent again
                self._delivered, lengths = 0, []
            self._position = sum(lengths)
        return run

    def _deliver_journal(self, run: ServerRun) -> None:
        """Sends the records behind the position, and counts each in ``sent.json``."""
        with journal_file(self._folder).open("rb") as file:
            file.seek(self._position)
            for line in complete_lines(file):
                self._deliver_line(run, line)
                if self._abandoned.is_set():
                    return
                self._position += len(line)
                self._delivered += 1
                self.save()
        self._error = None

    def _deliver_line(self, run: ServerRun, line: bytes) -> None:
        """Sends one record; if it fails while the server accepts other requests, stores it among the refused ones."""
        # Once a server has refused a record for good, each further one is sent once: a folder may have any number.
        for attempt in range(1 if self._warned_of_refusal else _TRIES):
            try:
                run.send(read_record(line), self._folder)
                return
            except Exception as error:
                cause = one_line(error, self._uri)
            # If this fails too, the fault is the server's, not the record's.
            run.probe()
            time.sleep(0.1 * 2**attempt)
        if not self._abandoned.is_set():
            with open_to_append(self._rejected) as file:
                file.write(json.dumps({"cause": cause, "record": line.decode(errors="replace")}) + "\n")
            if not self._warned_of_refusal:  # warns once: a server without artifacts refuses every file
                self._warned_of_refusal = True
                _logger.warning(
                    "tracking: %s refused a record, kept in %s: %s", self._shown, self._rejected, cause
                )

    def _deliver_rejected(self, run: ServerRun) -> None:
        """Tries the refused records once more and keeps those that are refused again."""
        if not self._rejected.is_file():
            return
        still_refused = []
        for line in stored_bytes(self._rejected).splitlines():
            try:
                run.send(read_record(plain_json(line)["record"].encode()), self._folder)
            except Exception:
                still_refused.append(line + b"\n")
        self._replace(self._rejected, b"".join(still_refused))

    def _replace(self, path: Path, content: bytes) -> None:
        """Replaces a file in one step; removes it if there is no content."""
        if self._abandoned.is_set():
            return
        if not content:
            path.unlink(missing_ok=True)
        else:
            with atomic(path) as partial:
                partial.write_bytes(content)

    def _report(self, cause: Exception, failures: int) -> None:
        """Notes a failure, and warns once of repeated failures."""
        said = one_line(cause, self._uri)
        self._error = said if isinstance(cause, UserError) else f"{self._shown}: {said}"
        # A single failure often comes from a database that another run has locked for a moment.
        if failures > 1 and not self._warned:
            self._warned = True
            _logger.warning("tracking: %s; records are kept in %s and sent later", self._error, self._files)


def _read_sent(folder: Path) -> dict[str, Any]:
    """Reads ``sent.json``; if it is missing or damaged, all records are sent again, which does no harm."""
    kinds = {"uri": str, "run_id": str, "experiment_id": str, "delivered": int}
    try:
        sent = plain_json(stored_bytes(tracking_folder(folder) / "sent.json"))
    except (OSError, ValueError, UserError):
        return {}
    if not isinstance(sent, dict):
        return {}
    return {key: sent[key] for key, kind in kinds.items() if isinstance(sent.get(key), kind)}
