"""Storages of studies that were changed by hand, or that a worker left half written."""

import shutil
import sqlite3

import optuna
import pytest
from helpers.refusals import refusal
from helpers.studies import neighbours, sweep

from lit_fedad.report.console import Display
from lit_fedad.sweep import storage
from lit_fedad.sweep.storage import open_storage


def add_trials(opened, count):
    study = optuna.create_study(study_name="study", storage=opened, load_if_exists=True)
    for _ in range(count):
        study.tell(study.ask({"x": optuna.distributions.IntDistribution(0, 9)}), 0.5)
    return study.get_trials()


@pytest.fixture(scope="module")
def database(tmp_path_factory):
    """With a study of two trials; to make its tables takes a second."""
    file = tmp_path_factory.mktemp("database") / "study.db"
    add_trials(open_storage(f"sqlite:///{file}", file.with_name("study")), 2)
    return file


@pytest.mark.parametrize(
    "statement",
    [
        "update trial_params set distribution_json = '{'",
        "update trial_params set param_value = 'x'",
        "update trial_values set value = null",
        "update trials set number = 0",
        "update trials set number = number - 1",
        "update study_directions set direction = 'UP'",
    ],
)
def test_a_study_in_a_database_that_cannot_be_read_is_one_line(database, tmp_path, statement):
    url, out = f"sqlite:///{tmp_path}/study.db", tmp_path / "study"
    shutil.copy(database, tmp_path)
    connection = sqlite3.connect(tmp_path / "study.db")
    connection.execute("pragma ignore_check_constraints = 1")
    connection.execute(statement)
    connection.commit()
    connection.close()
    with refusal(rf"^storage={url}: its study 'study' cannot be read \(\w+\); give another out=DIR"):
        open_storage(url, out)


def test_a_journal_nested_without_end_is_one_line(tmp_path):
    add_trials(open_storage("journal", tmp_path), 1)
    with (tmp_path / "journal.log").open("ab") as file:
        file.write(b"[" * 100_000 + b"\n")
    with refusal(rf"^{tmp_path}/journal\.log: cannot be read as a study's journal \(RecursionError\)"):
        open_storage("journal", tmp_path)


def test_a_journal_of_any_length_is_not_read(tmp_path, monkeypatch):
    add_trials(open_storage("journal", tmp_path), 1)
    monkeypatch.setattr(storage, "_LARGEST", 10)
    with refusal(rf"^{tmp_path}/journal\.log: has \d+ bytes, more than any study's journal"):
        open_storage("journal", tmp_path)


def test_a_half_written_line_costs_no_trial(tmp_path):
    """As a full disk leaves it: Optuna would write on behind it, and read nothing from there on."""
    running = open_storage("journal", tmp_path)
    add_trials(running, 1)
    with (tmp_path / "journal.log").open("ab") as file:
        file.write(b'{"op_code":5,"worker_id":"gone","trial')
    add_trials(running, 1)
    assert len(add_trials(open_storage("journal", tmp_path), 1)) == 3


def test_a_range_that_cannot_be_drawn_from_is_one_line(options, study_file):
    wide = "{type: float, low: -1.0e+308, high: 1.0e+308}"
    text = study_file.read_text().replace("{type: float, low: 1.0e-5, high: 1.0e-2, log: true}", wide)
    study_file.write_text(
        text.replace("TPESampler, n_startup_trials: 3, constant_liar: true", "RandomSampler")
    )
    with refusal(r"^optuna\.samplers\.RandomSampler draws no trial: Range exceeds valid bounds$"):
        sweep([*options, "n_trials=3"], Display(quiet=True), neighbours)
