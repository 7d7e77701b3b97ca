"""Workers of one study: how many trials there are, what becomes of lost, refused and pruned ones."""

import os
import re
import signal
import time

import optuna
import pandas as pd
import pytest
from helpers.refusals import refusal
from helpers.studies import neighbours, steps, sweep
from optuna.trial import TrialState

from lit_fedad.core.errors import UserError
from lit_fedad.report.console import Display
from lit_fedad.sweep import command, storage, worker
from lit_fedad.sweep.storage import check_trials, last_attempts, open_storage
from lit_fedad.sweep.trial import PrunedError

pytestmark = [
    pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning"),
]
write_results = command.write_results


@pytest.fixture(autouse=True)
def no_figures(monkeypatch):
    """They take longer than the trials."""
    monkeypatch.setattr(command, "write_results", lambda study, plan, out: [])


def wait_for(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.02)


@pytest.mark.slow
def test_one_worker_plays_the_default_first_and_shows_the_best(
    options, tmp_path, opened, capsys, monkeypatch
):
    def warned(trial, plan, folder, leaving):
        Display(quiet=True).warn("few images")
        return neighbours(trial, plan, folder, leaving)

    monkeypatch.setattr(command, "write_results", write_results)
    sweep([*options, "n_trials=5"], Display(), warned)
    trials = opened().trials
    assert [trial.number for trial in trials] == list(range(5))
    assert trials[0].params == {"task.loss.neighbours": 3, "task.learning_rate": 1e-4}
    assert sum(trial.user_attrs.get("default", False) for trial in trials) == 1
    best = max(trial.values[0] for trial in trials)
    said = capsys.readouterr()
    assert f"the best is better than the default by {best - 3:.4g}" in said.out
    assert said.err.count("few images") == 1, "trials have the warning in common"
    table = pd.read_csv(tmp_path / "study" / "trials.csv")
    assert table["pro"].tolist() == [trial.values[0] for trial in trials]
    assert table["folder"].tolist() == [f"trial_{n}" for n in range(5)]
    assert {"importance.png", "slices.png", "history.png"} <= {
        path.name for path in (tmp_path / "study" / "figures").iterdir()
    }
    # The same command adds nothing; a look at it needs no trial; another base does not fit in.
    for count in ("n_trials=5", "n_trials=0"):
        sweep([*options, count], Display(quiet=True), neighbours)
        assert len(opened().trials) == 5
    with pytest.raises(UserError, match="another base, search space or objective"):
        sweep([*options, "rounds=7"], Display(quiet=True), neighbours)


@pytest.mark.slow
def test_three_workers_share_the_trials_exactly(options, start, forking, opened, tmp_path):
    workers = [start([*options, "n_trials=13"], neighbours) for _ in range(3)]
    assert [forking.wait(worker) for worker in workers] == [0, 0, 0]
    trials = opened().trials
    assert [trial.number for trial in trials] == list(range(13))
    assert {trial.state for trial in trials} == {TrialState.COMPLETE}
    assert {path.name for path in (tmp_path / "study").glob("trial_*")} == {f"trial_{n}" for n in range(13)}
    drawn = [trial.params["task.learning_rate"] for trial in trials]
    assert len(set(drawn)) == 13  # workers with the same seed would have drawn the same numbers


@pytest.mark.slow
def test_worker_asked_to_leave_gives_its_trial_back(options, start, forking, opened, tmp_path):
    worker = start([*options, "n_trials=1"], steps)
    log = tmp_path / "study" / "trial_0" / "steps.txt"
    wait_for(log.exists)
    os.kill(worker, signal.SIGUSR1)
    assert forking.wait(worker) == 0
    assert [trial.state.name for trial in opened().trials] == ["FAIL", "WAITING"]
    assert 0 < len(log.read_text().split()) < 5
    sweep([*options, "n_trials=1"], Display(quiet=True), steps)
    assert log.read_text().split() == list("01234")
    assert last_attempts(opened())[0].user_attrs["given_back"] == 1


@pytest.mark.parametrize("given_back", [0, 2])
def test_trial_that_kills_its_workers_is_given_up_and_one_that_is_given_back_is_not(given_back):
    study = optuna.create_study()
    study.enqueue_trial({"x": 1.0}, user_attrs={"given_back": given_back})
    for _ in range(9):
        if all(trial.state.is_finished() for trial in study.trials) and study.trials:
            break
        trial = study.ask({"x": optuna.distributions.FloatDistribution(0, 2)})
        assert trial.params == {"x": 1.0}
        storage.pass_on(study, study.tell(trial, state=TrialState.FAIL))
    assert len(study.trials) == storage.RETRIES + given_back + 1


def test_study_ends_when_its_sampler_has_tried_all_values(options, study_file, capsys, opened):
    study_file.write_text("""\
base: [method=federated_bank, debug=seconds, tracking=off, evaluation.pictures=0]
objectives: {pro: maximize}
space: {task.loss.neighbours: {type: int, low: 1, high: 3}}
sampler: {_target_: optuna.samplers.BruteForceSampler}
pruner: {_target_: optuna.pruners.HyperbandPruner}
trials: 9
""")
    sweep(options, Display(), neighbours)
    tried = {trial.params["task.loss.neighbours"] for trial in opened().trials}
    assert tried == {1, 2, 3}
    assert (trials := len(opened().trials)) < 9
    assert "all values of the search space have been tried" in capsys.readouterr().out
    sweep(options, Display(), neighbours)
    assert len(opened().trials) == trials
    assert "all values of the search space have been tried" in capsys.readouterr().out


def test_failures_are_recorded_with_their_cause_and_pruned_ones_as_such(options, opened):
    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)]

    def mixed(trial, plan, folder, leaving):
        match trial.number:
            case 1:
                raise UserError("task.loss.neighbours=9 must be at most 8")
            case 2:
                raise PrunedError("round 1")
            case 3:
                raise RuntimeError("out of memory")
        return [1.0]

    sweep([*options, "n_trials=5"], Display(quiet=True), mixed)
    trials = opened().trials
    assert [t.state.name for t in trials] == ["COMPLETE", "FAIL", "PRUNED", "FAIL", "COMPLETE"]
    assert trials[1].user_attrs["cause"] == "task.loss.neighbours=9 must be at most 8"
    assert trials[3].user_attrs["cause"] == "RuntimeError: out of memory"
    assert {trial.user_attrs["worker"] for trial in trials} == {0}
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)] == handlers


def test_a_sampler_that_cannot_draw_is_one_line_and_its_trial_waits_for_another(options, opened, monkeypatch):
    class Lacking(optuna.samplers.RandomSampler):
        def sample_independent(self, *given):
            raise ModuleNotFoundError("No module named 'cmaes'")

    with monkeypatch.context() as patch:
        patch.setattr(command.Plan, "make_sampler", lambda self, seed: Lacking())
        with refusal(r"^optuna\.samplers\.TPESampler draws no trial: No module named 'cmaes'$"):
            sweep([*options, "n_trials=3"], Display(quiet=True), neighbours)
    states = [trial.state for trial in last_attempts(opened()).values()]
    assert states == [TrialState.COMPLETE, TrialState.WAITING]
    sweep([*options, "n_trials=3"], Display(quiet=True), neighbours)
    states = [trial.state for trial in last_attempts(opened()).values()]
    assert states == [TrialState.COMPLETE] * 3


def test_study_whose_first_trials_all_fail_ends(options, opened):
    def refused(trial, plan, folder, leaving):
        raise UserError("data.root=/nowhere does not exist")

    with pytest.raises(UserError, match="all 3 trials so far failed; the last: data.root=/nowhere"):
        sweep([*options, "n_trials=9"], Display(quiet=True), refused)
    assert len(opened().trials) == 3
    with pytest.raises(UserError, match="all 3 trials .*; a larger n_trials adds others$"):
        sweep([*options, "n_trials=3"], Display(quiet=True), neighbours)
    sweep([*options, "n_trials=4"], Display(quiet=True), neighbours)


@pytest.mark.slow
def test_sqlite_serves_one_host_and_one_folder(options, tmp_path, monkeypatch):
    options = [*options, f"storage=sqlite:///{tmp_path}/study.db", "n_trials=1"]
    sweep(options, Display(quiet=True), neighbours)
    other = [*options, f"out={tmp_path}/elsewhere/study"]
    with pytest.raises(UserError, match="all workers of a study share one"):
        sweep(other, Display(quiet=True), neighbours)
    monkeypatch.setattr(command.socket, "gethostname", lambda: "node-2")
    with pytest.raises(UserError, match="storage=sqlite: this study belongs to host"):
        sweep(options, Display(quiet=True), neighbours)


@pytest.mark.parametrize("trials", [0, 5])
def test_a_study_is_not_begun_anew_in_a_storage_that_does_not_hold_it(options, tmp_path, opened, trials):
    sweep([*options, "n_trials=3"], Display(quiet=True), neighbours)
    other = f"storage=sqlite:///{tmp_path}/other.db"
    with refusal("the storage holds no study of this folder; give the storage= that it was begun with"):
        sweep([*options, other, f"n_trials={trials}"], Display(quiet=True), neighbours)
    assert len(opened().trials) == 3


def test_a_worker_lives_as_long_as_it_holds_its_lock(tmp_path):
    first, second = (worker.Registry(tmp_path) for _ in range(2))
    assert second.number == 1
    assert second.lives(first.number)
    first.lock.release()
    assert not second.lives(first.number)
    assert worker.Registry(tmp_path).number == 2


def test_a_worker_leaves_a_trial_that_was_passed_on_meanwhile(options, opened, capsys):
    def lost(trial, plan, folder, leaving):
        if trial.number == 1:
            trial.study.tell(trial.number, state=TrialState.FAIL)
            trial.set_user_attr("round", 1)  # as after each checkpoint
        return [1.0]

    sweep([*options, "n_trials=3"], Display(quiet=True), lost)
    assert [trial.state.name for trial in opened().trials] == ["COMPLETE", "FAIL", "COMPLETE"]
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


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("storage=oracle://db", "storage=oracle: give one of journal, "),
        ("storage=journl", "storage=journl: give one of journal, "),
        ("storage=sqlite:////nowhere/at/all.db", "storage=sqlite://... cannot be opened"),
        ("n_trials=many", "sweep.n_trials='many' must be int or null"),
        ("n_trials=-1", "n_trials=-1 must be at least 0"),
        ("seed=-1", "seed=-1 must be at least 0"),
        ("n_trial=3", "sweep has no key 'n_trial'; did you mean 'n_trials'?"),
        ("n_trials=0", "there is no study to show"),
    ],
)
def test_bad_options_end_in_a_line(options, option, message, monkeypatch):
    monkeypatch.setattr(command, "read_plan", lambda study, overrides: PLAN)
    with refusal() as error:
        sweep([*options, option], Display(quiet=True), neighbours)
    assert message in str(error.value)


PLAN = command.Plan([], {"pro": "maximize"}, {}, {"_target_": "optuna.samplers.RandomSampler"}, 3)


@pytest.mark.parametrize("name", ["journal.log", "study.id", "claim.lock", "workers/0.lock"])
def test_nothing_is_written_through_a_link_in_the_study_s_folder(options, tmp_path, name):
    taken, victim = tmp_path / "study" / name, tmp_path / "victim"
    taken.parent.mkdir(parents=True)
    taken.symlink_to(victim)
    with pytest.raises(UserError, match="is a link and no file"):
        sweep(options, Display(quiet=True), neighbours)
    assert not victim.exists()


@pytest.mark.parametrize("text", ["notes\nof something else\n", None])
def test_a_journal_of_something_else_is_named(options, tmp_path, text):
    if text is None:  # one with a value that no key of whole numbers has
        sweep([*options, "n_trials=1"], Display(quiet=True), neighbours)
        held = (tmp_path / "study" / "journal.log").read_text()
        text = re.sub(r'"param_value_internal":3.0', '"param_value_internal":1e400', held)
    (tmp_path / "study").mkdir(exist_ok=True)
    (tmp_path / "study" / "journal.log").write_text(text)
    with pytest.raises(UserError, match=r"journal\.log: cannot be read as a study's journal"):
        sweep(options, Display(quiet=True), neighbours)


@pytest.mark.parametrize(
    "said", [{"user_attrs": {"cause": 5}}, {"system_attrs": {"retry_history": 5}}, {"values": [0.5, 0.5]}]
)
def test_trials_of_another_form_are_one_line(said):
    study = optuna.create_study(directions=["maximize"] * len(said.get("values", [0.5])))
    study.add_trial(optuna.trial.create_trial(**{"values": [0.5], **said}))
    with pytest.raises(UserError, match="^trial 0 of this study cannot be read"):
        check_trials(study, 1)


def test_password_is_not_repeated(tmp_path):
    with pytest.raises(UserError) as error:
        open_storage("postgresql://me:secret@127.0.0.1:9/db", tmp_path)
    assert "secret" not in str(error.value)
