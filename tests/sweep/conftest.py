"""Small studies, and workers whose trials take no time."""

import os
import signal

import optuna
import pytest

from lit_fedad.sweep.storage import open_storage

STUDY = """\
base: [method=federated_bank, debug=seconds, tracking=off, evaluation.pictures=0]
objectives: {pro: maximize}
space:
  task.loss.neighbours: {type: int, low: 1, high: 8}
  task.learning_rate: {type: float, low: 1.0e-5, high: 1.0e-2, log: true}
sampler: {_target_: optuna.samplers.TPESampler, n_startup_trials: 3, constant_liar: true}
pruner: {_target_: optuna.pruners.MedianPruner, n_startup_trials: 1}
trials: 4
"""


@pytest.fixture
def study_file(tmp_path):
    path = tmp_path / "small.yaml"
    path.write_text(STUDY)
    return path


@pytest.fixture
def options(study_file, tmp_path):
    return [f"study={study_file}", f"out={tmp_path / 'study'}"]


@pytest.fixture
def opened(tmp_path):
    """The study as it stands in its journal."""
    return lambda: optuna.load_study(study_name="study", storage=open_storage("journal", tmp_path / "study"))


@pytest.fixture
def start(forking, tmp_path):
    """Starts a worker in a process of its own, and returns its id."""
    workers = []

    def begin(options, play):
        log = tmp_path / f"worker-{len(workers)}.txt"
        workers.append(forking.call("helpers.studies:work", [options, play.__name__], log))
        return workers[-1]

    yield begin
    for worker in forking.running & {*workers}:
        os.kill(worker, signal.SIGKILL)
        forking.wait(worker)
