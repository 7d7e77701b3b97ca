"""Small studies, and workers whose trials take no time."""

import multiprocessing

import pytest
from helpers.studies import sweep

from lit_fedad.report.console import Display

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
def start():
    """Starts a worker in a process of its own."""
    processes = []

    def begin(options, play):
        context = multiprocessing.get_context("fork")
        process = context.Process(target=sweep, args=(options, Display(quiet=True), play))
        process.start()
        processes.append(process)
        return process

    yield begin
    for process in processes:
        process.kill()
        process.join()
