"""One of the processes that share a study: takes a trial, plays it, and looks after trials of lost workers."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
from filelock import FileLock
from optuna import Study, Trial
from optuna.exceptions import UpdateFinishedTrialError
from optuna.storages import fail_stale_trials
from optuna.storages._heartbeat import BaseHeartbeat, is_heartbeat_enabled
from optuna.trial import FrozenTrial, TrialState

from lit_fedad.errors import UserError
from lit_fedad.report.console import Display
from lit_fedad.sweep.plan import Plan
from lit_fedad.sweep.storage import GIVEN_BACK, WORKER, attempts, pass_on, standing

_ENDED = (TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAIL)
_HOPELESS = 3  # failures in a row, from the first trial on, that are the study's fault


class PrunedError(Exception):
    """A trial is not worth going on with."""


class GivenBackError(Exception):
    """A worker was asked to stop, and its trial has a checkpoint."""


class PlanError(UserError):
    """What no other trial of the study would do better."""


Play = Callable[[Trial, Plan, Path, Callable[[], bool]], Sequence[float]]
"""Plays a trial in its folder, asking now and then whether to give it back; returns a value an objective."""


class Registry:
    """The study's workers: a file each in a folder that all of them see, touched while its worker lives.

    Args:
        folder: Where the files lie.
        patience_s: Seconds after which an untouched file's worker counts as lost, if it ran on another host.
    """

    def __init__(self, folder: Path, patience_s: float) -> None:
        self.folder, self.patience_s = folder, patience_s
        folder.mkdir(parents=True, exist_ok=True)
        self.number = len(list(folder.glob("*.json")))  # under the study's lock; files are never removed
        me = {"host": socket.gethostname(), "pid": os.getpid(), "began": psutil.Process().create_time()}
        self._file(self.number).write_text(json.dumps(me))

    def beat(self) -> None:
        """Says that this worker lives."""
        self._file(self.number).touch()

    def lives(self, number: int) -> bool:
        """Whether a worker is still there."""
        who = json.loads(self._file(number).read_text())
        if who["host"] == socket.gethostname():
            try:  # another process may have the number by now, and a dead one waits for its parent
                process = psutil.Process(who["pid"])
                return process.create_time() == who["began"] and process.status() != psutil.STATUS_ZOMBIE
            except psutil.NoSuchProcess:
                return False
        self.beat()  # both times are the file server's, whose clock need not be this host's
        age = self._file(self.number).stat().st_mtime - self._file(number).stat().st_mtime
        return age <= self.patience_s

    def _file(self, number: int) -> Path:
        return self.folder / f"{number}.json"


class Worker:
    """Plays trials until the study has as many as it should.

    Args:
        study: Shared with the other workers.
        plan: What its trials are.
        out: The study's folder, which all workers see.
        trials: How many trials the study should have; one that is passed on counts once.
        registry: This worker among the others.
        lock: Held while trials are dealt out.
        play: Plays one trial.
        display: Says what happens.
    """

    def __init__(
        self,
        study: Study,
        plan: Plan,
        out: Path,
        trials: int,
        registry: Registry,
        lock: FileLock,
        play: Play,
        display: Display,
    ) -> None:
        self.study, self.plan, self.out, self.trials = study, plan, out, trials
        self.registry, self.lock, self.play, self.display = registry, lock, play, display
        self.leaving = threading.Event()
        self._trial_id: int | None = None

    def run(self) -> None:
        """Plays trials; at the end waits for those of other workers, which may still be lost.

        Raises:
            UserError: If the study's file is at fault, or its first trials all fail.
        """
        with self._signals(), self._heartbeat():
            said = False
            while not self.leaving.is_set():
                trial = self.claim()
                if trial is not None:
                    self.perform(trial)
                    self._refuse_the_hopeless()
                elif self._states().isdisjoint({TrialState.RUNNING, TrialState.WAITING}):
                    return
                else:
                    if not said:
                        self.display.note("waits for the other workers' trials")
                    said = True
                    self.leaving.wait(min(2.0, self.registry.patience_s / 4))

    def claim(self) -> Trial | None:
        """Takes a trial: one that was passed on, or the next one; None if there is none left."""
        with self.lock:
            self.reap()
            trials = standing(self.study)
            queued = any(trial.state == TrialState.WAITING for trial in trials.values())
            if not queued and len(trials) >= self.trials:
                return None
            trial = self.study.ask(self.plan.distributions)
            # The heartbeat comes first: a trial of a worker that dies here has one, or no worker.
            self._trial_id = trial._trial_id
            self._beat()
            trial.set_user_attr(WORKER, self.registry.number)
            return trial

    def reap(self) -> None:
        """Passes on the trials of lost workers; the study's lock must be held."""
        fail_stale_trials(self.study)
        heartbeat = is_heartbeat_enabled(self.study._storage)
        for trial in self.study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
            worker = trial.user_attrs.get(WORKER)
            # One without a worker was being dealt out when its worker died: nobody else holds the lock now.
            if worker is None or not (heartbeat or self.registry.lives(worker)):
                self.display.note(f"trial {self._name(trial)} was lost with its worker and is passed on")
                pass_on(self.study, self.study.tell(trial.number, state=TrialState.FAIL))

    def perform(self, trial: Trial) -> None:
        """Plays a trial and records how it ends; only what is the study's own fault is raised."""
        name = self._name(self.study.trials[trial.number])
        folder = self.out / f"trial_{name}"
        trial.set_user_attr("folder", folder.name)
        try:
            values = list(self.play(trial, self.plan, folder, self.leaving.is_set))
        except PrunedError as pruned:
            self.study.tell(trial, state=TrialState.PRUNED, skip_if_finished=True)
            self.display.note(f"trial {name}: pruned, {pruned}")
        except (GivenBackError, KeyboardInterrupt) as stop:
            trial.set_user_attr(GIVEN_BACK, trial.user_attrs.get(GIVEN_BACK, 0) + 1)
            pass_on(self.study, self.study.tell(trial, state=TrialState.FAIL))
            self.display.note(f"trial {name}: given back, {stop or 'interrupted'}")
            if isinstance(stop, KeyboardInterrupt):
                raise
        except UpdateFinishedTrialError:
            self.display.warn(f"trial {name} was taken for lost and passed on; this worker leaves it")
        except Exception as error:
            cause = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
            trial.set_user_attr("cause", cause)
            self.study.tell(trial, state=TrialState.FAIL)
            if isinstance(error, PlanError):
                raise
            self.display.warn(f"trial {name} failed: {cause}")
        else:
            self.study.tell(trial, values, skip_if_finished=True)
            told = ", ".join(f"{m} {v:.4g}" for m, v in zip(self.plan.objectives, values, strict=True))
            self.display.note(f"trial {name}: {told}")
        finally:
            self._trial_id = None

    def _name(self, trial: FrozenTrial) -> int:
        """A trial's place in the study, the same for all of its attempts."""
        first = attempts(trial)[0]
        return next(n for n, other in standing(self.study).items() if attempts(other)[0] == first)

    def _states(self) -> set[TrialState]:
        return {trial.state for trial in self.study.get_trials(deepcopy=False)}

    def _refuse_the_hopeless(self) -> None:
        ended = [trial for trial in standing(self.study).values() if trial.state in _ENDED]
        if len(ended) >= min(_HOPELESS, self.trials):
            refuse_failures(ended)

    @contextmanager
    def _heartbeat(self) -> Iterator[None]:
        over = threading.Event()

        def beats() -> None:
            while not over.wait(self.registry.patience_s / 4):
                with suppress(Exception):  # a database that is away for a moment must not end the heartbeat
                    self._beat()

        thread = threading.Thread(target=beats, name="heartbeat", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def _beat(self) -> None:
        self.registry.beat()
        trial_id = self._trial_id
        if trial_id is not None and isinstance(self.study._storage, BaseHeartbeat):
            self.study._storage.record_heartbeat(trial_id)

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """USR1: give the trial back after its next checkpoint. TERM: at once."""
        handlers: dict[signal.Signals, Any] = {
            signal.SIGUSR1: lambda *_: self.leaving.set(),
            signal.SIGTERM: signal.default_int_handler,
        }
        old = {number: signal.signal(number, handler) for number, handler in handlers.items()}
        try:
            yield
        finally:
            for number, handler in old.items():
                signal.signal(number, handler)


def refuse_failures(ended: Sequence[FrozenTrial]) -> None:
    """Refuses a study none of whose trials came to anything.

    Raises:
        UserError: With the last cause.
    """
    if ended and all(trial.state == TrialState.FAIL for trial in ended):
        causes = [trial.user_attrs["cause"] for trial in ended if "cause" in trial.user_attrs]
        raise UserError(
            f"all {len(ended)} trials so far failed; the last: {(causes or ['lost with its worker'])[-1]}"
        )
