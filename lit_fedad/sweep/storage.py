"""Opens the storage of a study, reads its trials, and queues trials of lost workers again."""

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

RETRIES = 3  # times that a trial is queued again after its worker was lost
GIVEN_BACK = "given_back"  # attribute of a trial: how often stopping workers have given it back
WORKER = "worker"  # attribute of a trial: number of the worker that plays it

_DRIVERS = {"postgresql": "'psycopg[binary]'", "mysql": "pymysql", "grpc": "grpcio"}
# Named here because the driver of a URL without one depends on the version of SQLAlchemy.
_PLAIN = {"postgresql": "postgresql+psycopg", "mysql": "mysql+pymysql"}
_FORMS = "journal, sqlite:///FILE, postgresql://..., mysql://..., grpc://HOST:PORT"


def open_storage(text: str, out: Path) -> BaseStorage:
    """Opens a study's storage.

    Args:
        text: ``journal``, the URL of a database, or ``grpc://host:port`` of Optuna's proxy.
        out: The study's folder.

    Raises:
        UserError: If it is none of these, does not answer, or its driver is missing. The message holds no password.
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
    except Exception as error:  # raised by SQLAlchemy, a driver or gRPC
        cause = str(error).strip().splitlines() or [type(error).__name__]
        raise UserError(
            f"storage={scheme}://... cannot be opened: {redact(cause[0].replace(address, '...'), text)}"
        ) from None  # the cause's text may hold the password
    raise UserError(f"storage={redact(scheme)}: give one of {_FORMS}")


def _journal(out: Path) -> JournalStorage:
    """Opens the study's journal, a file in its folder that several hosts can share."""
    log, lock = (check_own(out / name) for name in ("journal.log", "journal.lock"))
    try:
        # Unlike Optuna's own locks, this one is released when its worker is killed.
        storage = JournalStorage(JournalFileBackend(str(log), FileLock(lock)))
        storage.get_all_studies()  # reads the journal, so that a damaged one is refused here
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
