"""A worker whose trial another one has by now, and a worker that takes over such a trial."""

import contextlib
import threading
import time

import pytest
from helpers.studies import sweep
from optuna.trial import TrialState

from lit_fedad.experiment.claim import locked
from lit_fedad.report.console import Display
from lit_fedad.sweep import command
from lit_fedad.sweep.worker import GivenBackError

pytestmark = pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")


@pytest.fixture(autouse=True)
def no_figures(monkeypatch):
    """They take longer than the trials."""
    monkeypatch.setattr(command, "write_results", lambda study, plan, out: [])


@pytest.mark.parametrize(
    "stop", [RuntimeError("out of memory"), GivenBackError("round 3"), KeyboardInterrupt()]
)
def test_worker_leaves_a_trial_that_was_passed_on_however_it_ends_here(options, opened, capsys, stop):
    def lost(trial, plan, folder, leaving):
        if trial.number != 1:
            return [1.0]
        trial.study.tell(trial.number, state=TrialState.FAIL)
        raise stop

    stopped = (
        pytest.raises(KeyboardInterrupt) if type(stop) is KeyboardInterrupt else contextlib.nullcontext()
    )
    with stopped:
        sweep([*options, "n_trials=3"], Display(quiet=True), lost)
    assert [trial.state.name for trial in opened().trials][:2] == ["COMPLETE", "FAIL"]
    assert "trial 1 was taken for lost and passed on; this worker leaves it" in capsys.readouterr().err


def test_an_interrupted_worker_says_that_its_trial_is_given_back(options, opened, capsys):
    def interrupted(trial, plan, folder, leaving):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sweep([*options, "n_trials=3"], Display(), interrupted)
    said = capsys.readouterr().out
    assert "worker 0 of study study, 0 of 3 trials begun" in said  # the default is only queued
    assert "trial 0: given back, interrupted\n" in said
    assert [trial.state.name for trial in opened().trials] == ["FAIL", "WAITING"]


def test_a_trial_begins_when_a_worker_that_was_taken_for_lost_has_left_its_folder(
    options, tmp_path, opened, monkeypatch
):
    holds, begins = threading.Event(), threading.Event()
    monkeypatch.setattr(
        Display, "note", lambda self, text: begins.set() if text.startswith("trial 0 begins") else None
    )

    def stall():
        with locked(tmp_path / "study" / "trial_0"):
            holds.set()
            begins.wait(60)
            time.sleep(0.2)

    def play(trial, plan, folder, leaving):
        with locked(folder):
            return [1.0]

    stalled = threading.Thread(target=stall)
    stalled.start()
    holds.wait(60)
    sweep([*options, "n_trials=1"], Display(), play)
    stalled.join()
    assert opened().trials[0].values == [1.0]
