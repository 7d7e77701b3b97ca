"""Opens the storage of a study, and passes on trials whose worker was lost."""

from __future__ import annotations

import copy
from pathlib import Path

from filelock import FileLock
from optuna import Study
from optuna.storages import BaseStorage, GrpcStorageProxy, JournalStorage, RDBStorage
from optuna.storages import RetryHeartbeatStaleTrialCallback as Retry
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, TrialState

from lit_fedad.core.errors import UserError
from lit_fedad.core.files import check_own
from lit_fedad.core.text import redact

RETRIES = 3
GIVEN_BACK = "given_back"
WORKER = "worker"

_DRIVERS = {"postgresql": "'psycopg[binary]'", "mysql": "pymysql", "grpc": "grpcio"}
# What a plain URL means depends on the version of SQLAlchemy.
_PLAIN = {"postgresql": "postgresql+psycopg", "mysql": "mysql+pymysql"}
_FORMS = "journal, sqlite:///FILE, postgresql://..., mysql://..., grpc://HOST:PORT"


def open_storage(text: str, out: Path) -> BaseStorage:
    """Opens a study's storage.

    Args:
        text: ``journal``, the URL of a database, or ``grpc://host:port`` of Optuna's proxy.
        out: The study's folder.

    Raises:
        UserError: If it is none of these, does not answer, or its driver is missing. Passwords are not repeated.
    """
    if text == "journal":
        return _journal(out)
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
        raise UserError(f"storage={scheme}://... needs a driver: pip install {_DRIVERS[kind]}") from error
    except Exception as error:  # of SQLAlchemy, a driver or gRPC
        cause = str(error).strip().splitlines() or [type(error).__name__]
        raise UserError(
            f"storage={scheme}://... cannot be opened: {redact(cause[0].replace(address, '...'), text)}"
        ) from None  # its cause may name the password
    raise UserError(f"storage={redact(scheme)}: give one of {_FORMS}")


def _journal(out: Path) -> JournalStorage:
    log, lock = (check_own(out / name) for name in ("journal.log", "journal.lock"))
    try:
        # Unlike Optuna's own locks, this one goes with a killed worker.
        storage = JournalStorage(JournalFileBackend(str(log), FileLock(lock)))
        storage.get_all_studies()  # reads it
    except (
        OSError,
        ArithmeticError,
        ValueError,
        LookupError,
        TypeError,
        AttributeError,
        AssertionError,
    ) as error:
        raise UserError(f"{log}: cannot be read as a study's journal ({type(error).__name__})") from error
    return storage


def check_trials(study: Study, objectives: int) -> None:
    """Checks what a storage says of trials: whoever can write to it may say anything.

    Args:
        study: The study.
        objectives: How many values a complete trial has.

    Raises:
        UserError: If a trial has others, or notes of other types.
    """
    for trial in study.get_trials(deepcopy=False):
        values, notes = trial.values, trial.user_attrs
        lost = trial.system_attrs.get("retry_history", [])
        counts = [
            notes.get(GIVEN_BACK, 0),
            notes.get(WORKER, 0),
            *(lost if isinstance(lost, list) else [None]),
        ]
        if (
            (values is None and trial.state == TrialState.COMPLETE)
            or not (values is None or [type(value) for value in values] == [float] * objectives)
            or not all(type(count) is int for count in counts)
            or not isinstance(notes.get("cause", ""), str)
        ):
            raise UserError(f"trial {trial.number} of this study cannot be read; give another out=DIR")


def pass_on(study: Study, trial: FrozenTrial) -> None:
    """Queues a trial that was lost with its worker, or given back by it, with the same parameters and folder.

    One that has been lost more than `RETRIES` times is not queued again: it may be what stops its workers.
    """
    trial = copy.deepcopy(trial)
    trial.user_attrs.pop(WORKER, None)
    lost = len(attempts(trial)) - trial.user_attrs.get(GIVEN_BACK, 0)
    if lost <= RETRIES:
        Retry(inherit_intermediate_values=True)(study, trial)


def attempts(trial: FrozenTrial) -> list[int]:
    """Lists the numbers under which a trial has been begun, the first one first and its own last."""
    return [*trial.system_attrs.get("retry_history", ()), trial.number]


def standing(study: Study) -> dict[int, FrozenTrial]:
    """Lists the study's trials, each as its last attempt, by its place: 0, 1, 2, ... without a gap."""
    latest = {attempts(trial)[0]: trial for trial in study.get_trials(deepcopy=False)}
    return dict(enumerate(latest[number] for number in sorted(latest)))
