"""Plays trials of a study in one of the processes that share it, and queues trials of lost workers again."""

from __future__ import annotations

import signal
import statistics
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from optuna import Study, Trial
from optuna.exceptions import UpdateFinishedTrialError
from optuna.trial import FrozenTrial, TrialState

from lit_fedad.core.errors import UserError
from lit_fedad.core.files import check_own
from lit_fedad.core.text import redact
from lit_fedad.report.console import Display
from lit_fedad.report.naming import clock
from lit_fedad.sweep.plan import Plan
from lit_fedad.sweep.storage import GIVEN_BACK, WORKER, attempts, last_attempts, pass_on
from lit_fedad.sweep.trial import GivenBackError, PlanError, PrunedError

_ENDED = (TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAIL)
_EXHAUSTED = "exhausted"  # attribute of the study: the sampler that has tried all values
_MOST_FAILURES = 3  # if this many first trials all fail, the study itself is at fault

Play = Callable[[Trial, Plan, Path, Callable[[], bool]], Sequence[float]]
"""A function that plays a trial in its folder, asks its last argument whether to give the trial back, and returns one
value for each objective."""


class Registry:
    """The study's workers: each holds a lock in a shared folder, which the system releases when its worker ends.

    The study's lock must be held when a registry is made, so that each worker gets a number of its own.

    Args:
        folder: Folder of the locks, and of a file for each number that was given.

    Attributes:
        number: The number of this worker.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.number = len(list(folder.glob("*.worker")))
        # This file marks the number as given: the lock's own file may be removed when it is released.
        check_own(folder / f"{self.number}.worker").touch()
        self.lock = self._lock(self.number)
        self.lock.acquire(timeout=0)

    def lives(self, number: int) -> bool:
        """Tells whether a worker still runs."""
        try:
            with self._lock(number).acquire(timeout=0):
                return False
        except Timeout:
            return True

    def _lock(self, number: int) -> FileLock:
        return FileLock(check_own(self.folder / f"{number}.lock"))


@dataclass
class Worker:
    """A process that plays trials until the study has as many as it should.

    Attributes:
        trials: How many trials the study should have; a trial that is queued again counts once.
        lock: The study's lock, which a worker holds while it claims a trial.
        leaving: Set when this worker was asked to stop.
    """

    study: Study
    plan: Plan
    out: Path
    trials: int
    registry: Registry
    lock: FileLock
    play: Play
    display: Display
    leaving: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        # Samplers that try all values call this method after the last one. Optuna's own only works in `Study.optimize`.
        self.study.stop = self._exhaust  # type: ignore[method-assign]

    def run(self) -> None:
        """Plays trials; at the end waits for the trials of other workers, in case one is lost.

        Raises:
            UserError: If the study's file is at fault, or its first trials all fail.
        """
        with self._signals():
            announced = False
            while not self.leaving.is_set():
                trial = self.claim()
                if trial is not None:
                    self.perform(trial)
                    ended = [trial for trial in last_attempts(self.study).values() if trial.state in _ENDED]
                    if len(ended) >= min(_MOST_FAILURES, self.trials):
                        refuse_failures(ended)
                elif not self.study.get_trials(
                    deepcopy=False, states=(TrialState.RUNNING, TrialState.WAITING)
                ):
                    if self.exhausted:
                        self.display.note(
                            "all values of the search space have been tried: the study is finished"
                        )
                    return
                else:
                    if not announced:
                        self.display.note("waits for the other workers' trials")
                    announced = True
                    self.leaving.wait(1.0)

    def claim(self) -> Trial | None:
        """Claims a trial that was queued again, or else the next new one; returns None if there is none left."""
        with self.lock:
            self.reap()
            trials = last_attempts(self.study)
            queued = any(trial.state == TrialState.WAITING for trial in trials.values())
            if not queued and (self.exhausted or len(trials) >= self.trials):
                return None
            try:
                trial = self.study.ask(self.plan.distributions)
            # The sampler lacks a package, or cannot draw these ranges.
            except (ImportError, ValueError, ArithmeticError) as error:
                self.reap()  # ends the trial that has begun
                raise UserError(f"{self.plan.sampler['_target_']} draws no trial: {error}") from error
            trial.set_user_attr(WORKER, self.registry.number)
            return trial

    @property
    def exhausted(self) -> bool:
        """Whether the study's sampler has tried all values, in this or another worker."""
        return bool(self.study.user_attrs.get(_EXHAUSTED) == self.plan.sampler_named())

    def _exhaust(self) -> None:
        """Notes that the sampler has tried all values, so that no worker begins a further trial."""
        if not self.exhausted:
            self.study.set_user_attr(_EXHAUSTED, self.plan.sampler_named())

    def reap(self) -> None:
        """Queues the trials of lost workers again; the study's lock must be held."""
        for trial in self.study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
            worker = trial.user_attrs.get(WORKER)
            # A trial without a worker was being claimed when its worker died: nobody else can be claiming it, since
            # this worker holds the lock.
            if worker is None or not self.registry.lives(worker):
                self.display.note(f"trial {self._name(trial)} was lost with its worker and is passed on")
                pass_on(self.study, self.study.tell(trial.number, state=TrialState.FAIL))

    def perform(self, trial: Trial) -> None:
        """Plays a trial and records how it ends.

        Raises:
            PlanError: If the study file is at fault. All other errors of a trial are recorded.
            KeyboardInterrupt: If this worker is interrupted; the trial is given back.
        """
        name = self._name(self.study.trials[trial.number])
        folder = self.out / f"trial_{name}"
        trial.set_user_attr("folder", folder.name)
        params = ", ".join(f"{key}={value}" for key, value in trial.params.items())
        self.display.note(f"trial {name} begins: {params or 'the plan alone'}")
        try:
            values = list(self.play(trial, self.plan, folder, self.leaving.is_set))
        except PrunedError as pruned:
            self.study.tell(trial, state=TrialState.PRUNED, skip_if_finished=True)
            self.display.note(f"trial {name}: pruned, {pruned}")
        except (GivenBackError, KeyboardInterrupt) as stop:
            trial.set_user_attr(GIVEN_BACK, trial.user_attrs.get(GIVEN_BACK, 0) + 1)
            pass_on(self.study, self.study.tell(trial, state=TrialState.FAIL))
            self.display.note(f"trial {name}: given back, {str(stop) or 'interrupted'}")
            if isinstance(stop, KeyboardInterrupt):
                raise
        except UpdateFinishedTrialError:  # a failing file server has released this worker's lock to another
            self.display.warn(f"trial {name} was taken for lost and passed on; this worker leaves it")
        except Exception as error:
            cause = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
            cause = redact(cause)  # it is stored, and written to trials.csv
            trial.set_user_attr("cause", cause)
            self.study.tell(trial, state=TrialState.FAIL)
            if isinstance(error, PlanError):
                raise
            self.display.warn(f"trial {name} failed: {cause}")
        else:
            self.study.tell(trial, values, skip_if_finished=True)
            results = ", ".join(f"{m} {v:.4g}" for m, v in zip(self.plan.objectives, values, strict=True))
            self.display.note(f"trial {name}: {results}; {self._progress()}")

    def _name(self, trial: FrozenTrial) -> int:
        """Finds a trial's number in `last_attempts`, which is the same for all of its attempts."""
        first = attempts(trial)[0]
        return next(n for n, other in last_attempts(self.study).items() if attempts(other)[0] == first)

    def _progress(self) -> str:
        """Says how many trials have ended, and how long the others take by the median time of those."""
        trials = list(last_attempts(self.study).values())
        ended = [trial for trial in trials if trial.state in _ENDED]
        seconds = [trial.duration.total_seconds() for trial in ended if trial.duration is not None]
        workers = 1 + sum(trial.state == TrialState.RUNNING for trial in trials)
        left = max(0, self.trials - len(ended))
        eta = f", about {clock(statistics.median(seconds) * left / workers)} left" if left and seconds else ""
        return f"{len(ended)} of {self.trials} trials ended{eta}"

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """Makes signals give the trial back: USR1 after its next checkpoint, TERM at once."""
        handlers: dict[signal.Signals, Any] = {
            signal.SIGUSR1: lambda *_: self.leaving.set(),
            signal.SIGTERM: signal.default_int_handler,
        }
        usual = {number: signal.signal(number, handler) for number, handler in handlers.items()}
        try:
            yield
        finally:
            for number, handler in usual.items():
                signal.signal(number, handler)


def refuse_failures(ended: Sequence[FrozenTrial]) -> None:
    """Refuses a study if all trials that have ended have failed.

    Raises:
        UserError: If all have failed; the message has the cause of the last.
    """
    if ended and all(trial.state == TrialState.FAIL for trial in ended):
        causes = [trial.user_attrs["cause"] for trial in ended if "cause" in trial.user_attrs]
        raise UserError(
            f"all {len(ended)} trials so far failed; the last: {(causes or ['lost with its worker'])[-1]}; a larger"
            " n_trials adds others"
        )
