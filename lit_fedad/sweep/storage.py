"""Opens the storage of a study, reads its trials, and queues trials of lost workers again."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock
from optuna import Study
from optuna.storages import BaseStorage, GrpcStorageProxy, JournalStorage, RDBStorage
from optuna.storages import RetryHeartbeatStaleTrialCallback as Retry
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, TrialState

from lit_fedad.core.errors import UserError
from lit_fedad.core.extras import install
from lit_fedad.core.files import check_own
from lit_fedad.core.text import redact
from lit_fedad.tracking.journal import complete_lines

_LARGEST = 1 << 30  # bytes of a journal
RETRIES = 3  # times that a trial is queued again after its worker was lost
GIVEN_BACK = "given_back"  # attribute of a trial: how often stopping workers have given it back
WORKER = "worker"  # attribute of a trial: number of the worker that plays it

# Named here because the driver of a URL without one depends on the version of SQLAlchemy.
_PLAIN = {"postgresql": "postgresql+psycopg", "mysql": "mysql+pymysql"}
_FORMS = "journal, sqlite:///FILE, postgresql://..., mysql://..., grpc://HOST:PORT"


def open_storage(text: str, out: Path) -> BaseStorage:
    """Opens a study's storage.

    Args:
        text: ``journal``, the URL of a database, or ``grpc://host:port`` of Optuna's proxy.
        out: The study's folder.

    Raises:
        UserError: If it is none of these, does not answer, its driver is missing, or what it holds of the study of this
            folder cannot be read. The message holds no password.
    """
    name = out.resolve().name
    if text == "journal":
        log, lock = (check_own(out / name) for name in ("journal.log", "journal.lock"))
        if log.exists() and (size := log.stat().st_size) > _LARGEST:
            raise UserError(f"{log}: has {size} bytes, more than any study's journal; give another out=DIR")
        with _readable(f"{log}: cannot be read as a study's journal"):
            # Unlike Optuna's own locks, this one is released when its worker is killed.
            journal = JournalStorage(_Journal(str(log), FileLock(lock)))
            _read(journal, name)
        return journal
    database = _database(text)
    with _readable(f"storage={redact(text)}: its study '{name}' cannot be read"):
        _read(database, name)
    return database


@contextmanager
def _readable(told: str) -> Iterator[None]:
    """Refuses what Optuna cannot read: anybody may have written it, and what Optuna raises then is of any kind."""
    try:
        yield
    except Exception as error:
        raise UserError(f"{told} ({type(error).__name__}); give another out=DIR") from None


def _read(storage: BaseStorage, name: str) -> None:
    """Reads all that a storage holds of a study, and checks the numbers of its trials."""
    if name in [study.study_name for study in storage.get_all_studies()]:
        trials = storage.get_all_trials(storage.get_study_id_from_name(name), deepcopy=False)
        if sorted(trial.number for trial in trials) != list(range(len(trials))):
            raise ValueError("its trials are not numbered from 0 on")


class _Journal(JournalFileBackend):
    """Optuna's file of a journal, without the half line that a full disk or a killed worker has left.

    Optuna would write the next line behind it, and could then read none of the following ones.
    """

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        with self._lock, Path(self._file_path).open("rb+") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 1))
            if file.read() not in (b"", b"\n"):
                file.seek(0)
                for _ in complete_lines(file):
                    pass
                file.truncate()
        super().append_logs(logs)


def _database(text: str) -> BaseStorage:
    """Opens a database, or Optuna's proxy of one."""
    scheme, separator, address = text.partition("://")
    kind = scheme.partition("+")[0]
    try:
        if separator and kind == "grpc":
            host, _, port = address.rstrip("/").rpartition(":")
            proxy = GrpcStorageProxy(host=host, port=int(port))
            proxy.wait_server_ready(timeout=20)
            return proxy
        if separator and kind in ("sqlite", "postgresql", "mysql"):
            return RDBStorage(f"{_PLAIN.get(scheme, scheme)}://{address}")
    except ImportError as error:
        raise UserError(f"storage={scheme}://... needs a driver: {install('sweeps')}") from error
    except Exception as error:  # raised by SQLAlchemy, a driver or gRPC
        cause = str(error).strip().splitlines() or [type(error).__name__]
        raise UserError(
            f"storage={scheme}://... cannot be opened: {redact(cause[0].replace(address, '...'), text)}"
        ) from None  # the cause's text may hold the password
    raise UserError(f"storage={redact(scheme)}: give one of {_FORMS}")


def check_trials(study: Study, objectives: int) -> None:
    """Checks the values and attributes of all trials, since anybody who can write to the storage may change them.

    Args:
        study: The study.
        objectives: How many values a complete trial has.

    Raises:
        UserError: If a trial has another number of values, or attributes of other types.
    """
    for trial in study.get_trials(deepcopy=False):
        values, attributes = trial.values, trial.user_attrs
        earlier = trial.system_attrs.get("retry_history", [])  # numbers of earlier attempts
        counts = [
            attributes.get(GIVEN_BACK, 0),
            attributes.get(WORKER, 0),
            *(earlier if isinstance(earlier, list) else [None]),
        ]
        if (
            (values is None and trial.state == TrialState.COMPLETE)
            or not (values is None or [type(value) for value in values] == [float] * objectives)
            or not all(type(count) is int for count in counts)
            or not isinstance(attributes.get("cause", ""), str)
        ):
            raise UserError(f"trial {trial.number} of this study cannot be read; give another out=DIR")


def pass_on(study: Study, trial: FrozenTrial) -> None:
    """Queues a trial again, with the same parameters and folder, after its worker was lost or has given it back.

    A trial that has been lost more than `RETRIES` times is not queued again: it may be what kills its workers.
    """
    trial = copy.deepcopy(trial)
    trial.user_attrs.pop(WORKER, None)
    lost = len(attempts(trial)) - trial.user_attrs.get(GIVEN_BACK, 0)
    if lost <= RETRIES:
        Retry(inherit_intermediate_values=True)(study, trial)


def attempts(trial: FrozenTrial) -> list[int]:
    """Lists the numbers of a trial's attempts, from the first to this one."""
    return [*trial.system_attrs.get("retry_history", ()), trial.number]


def last_attempts(study: Study) -> dict[int, FrozenTrial]:
    """Returns the study's trials, each as its last attempt, numbered 0, 1, 2, ... without a gap."""
    latest = {attempts(trial)[0]: trial for trial in study.get_trials(deepcopy=False)}
    return dict(enumerate(latest[number] for number in sorted(latest)))
