"""Workers that are killed while they share a study: with real trials, and over a database."""

import itertools
import os
import random
import signal
import time

import optuna
import psutil
import pytest
from helpers.studies import long_steps

from lit_fedad.experiment.run_folder import RunFolder
from lit_fedad.sweep.storage import attempts, last_attempts, open_storage

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning"),
]


@pytest.mark.long
def test_eight_trials_two_workers_three_kills(study_file, forking, tmp_path):
    """No trial is lost, none is played twice, and those of killed workers are continued."""
    out, kills, draw = tmp_path / "study", 3, random.Random(0)
    command = [
        *("sweep", f"study={study_file}", f"out={out}", "n_trials=8", "data.size=64"),
        *(f"data.root={tmp_path / 'data'}", f"cache.folder={tmp_path / 'cache'}", "fabric.accelerator=cpu"),
    ]
    logs, log_of = itertools.count(), {}

    def begin():
        log = tmp_path / f"log-{next(logs)}.txt"
        worker = forking.start(command, log)
        log_of[worker] = log
        return worker

    def runs(worker):
        return psutil.Process(worker).status() != psutil.STATUS_ZOMBIE

    workers = [begin() for _ in range(2)]
    deadline = time.monotonic() + 3000
    try:
        # On a fast machine the study may end before so many have been killed.
        while kills and any(map(runs, workers)):
            time.sleep(draw.uniform(0.5, 2))  # at any moment of a trial
            assert time.monotonic() < deadline
            chosen = draw.randrange(2)
            # A worker that is in no trial has nothing to lose.
            lines = log_of[workers[chosen]].read_text().splitlines()
            if not (lines and " begins: " in lines[-1]):
                continue
            if runs(workers[chosen]):
                os.kill(workers[chosen], signal.SIGKILL)
                forking.wait(workers[chosen])
                workers[chosen] = begin()
                kills -= 1
        assert kills < 3
        while any(map(runs, workers)):
            assert time.monotonic() < deadline
            time.sleep(0.1)
    finally:
        for worker in workers:
            os.kill(worker, signal.SIGKILL)
    said = [path.read_text() for path in tmp_path.glob("log-*.txt")]
    assert [forking.wait(worker) for worker in workers] == [0, 0], said
    study = optuna.load_study(study_name="study", storage=open_storage("journal", out))
    trials = last_attempts(study)
    assert list(trials) == list(range(8))
    assert {trial.state.name for trial in trials.values()} <= {"COMPLETE", "PRUNED"}
    assert {path.name for path in out.glob("trial_*")} == {f"trial_{n}" for n in range(8)}
    numbers = [number for trial in trials.values() for number in attempts(trial)]
    assert sorted(numbers) == [trial.number for trial in study.trials]
    passed_on = [trial for trial in trials.values() if len(attempts(trial)) > 1]
    assert passed_on
    for number, trial in trials.items():
        result = RunFolder(out / f"trial_{number}").result()
        if trial.state.name == "COMPLETE":
            assert trial.values == [result["last"]["pro"]["mean"]]
            # Two rounds behind the set-up exchanges, each in the history once, whoever played it.
            assert result["exchanges"] == sorted(set(result["exchanges"]))
            assert result["exchanges"][-1] == 2


def stopped_within_a_trial(pid, out):
    """Stop a worker and say whether it has begun a trial that it has not ended; if not, let it go on."""
    os.kill(pid, signal.SIGSTOP)
    for player in out.glob("trial_*/player.txt"):
        log = player.with_name("steps.txt")
        played = len(log.read_text().split()) if log.exists() else 0
        if player.read_text() == str(pid) and 1 <= played <= 4:
            return True
    os.kill(pid, signal.SIGCONT)
    return False


def test_a_database_passes_trials_on(study_file, tmp_path, start, forking):
    out, url = tmp_path / "study", f"sqlite:///{tmp_path}/study.db"
    options = [f"study={study_file}", f"out={out}", f"storage={url}", "n_trials=4"]
    first, second = start(options, long_steps), start(options, long_steps)
    end = time.monotonic() + 120
    while not stopped_within_a_trial(first, out):
        assert time.monotonic() < end
        time.sleep(0.5)
    os.kill(first, signal.SIGKILL)
    forking.wait(first)
    assert forking.wait(second) == 0
    study = optuna.load_study(study_name="study", storage=open_storage(url, out))
    trials = last_attempts(study)
    assert list(trials) == list(range(4))
    assert {trial.state.name for trial in trials.values()} == {"COMPLETE"}
    assert [len(attempts(trial)) for trial in trials.values()].count(2) == 1
    (lost,) = [trial for trial in study.trials if trial.state.name == "FAIL"]
    (again,) = [trial for trial in trials.values() if attempts(trial)[0] == lost.number]
    assert again.params == lost.params
    assert again.intermediate_values.items() >= lost.intermediate_values.items()
    for number in trials:
        assert (out / f"trial_{number}" / "steps.txt").read_text().split() == list("01234")
