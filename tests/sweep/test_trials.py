"""A trial is a run: what it reports, how it is pruned, how it goes on in the folder of one that was lost."""

import optuna
import pytest
from helpers.studies import sweep

from lit_fedad.core.errors import UserError
from lit_fedad.experiment.run_folder import RunFolder
from lit_fedad.experiment.track import RunStoppedError
from lit_fedad.federation.loop import Federation
from lit_fedad.federation.round_report import RoundReport
from lit_fedad.report.console import Display
from lit_fedad.sweep.command import Plan
from lit_fedad.sweep.plan import objective_value
from lit_fedad.sweep.storage import open_storage
from lit_fedad.sweep.trial import PlanError, _Watch, play_trial

pytestmark = pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")
SAMPLER = {"_target_": "optuna.samplers.RandomSampler"}


def report(round, value):
    return RoundReport(round, "train", [0], metrics={"pro": {"mean": value, "worst": 0.0, "pooled": 0.5}})


def plan(objective="pro", direction="maximize"):
    return Plan([], {objective: direction}, {}, SAMPLER, 2)


@pytest.fixture
def study():
    study = optuna.create_study(direction="maximize", pruner=optuna.pruners.MedianPruner(n_startup_trials=1))
    trial = study.ask()
    for round, value in enumerate([0.4, 0.5, 0.6]):
        trial.report(value, round)
    study.tell(trial, 0.6)
    return study


def test_bad_trial_is_pruned_and_a_good_one_and_the_default_are_not(study):
    good, bad, default = study.ask(), study.ask(), study.ask()
    default.set_user_attr("default", True)
    for trial, value in ((good, 0.7), (default, 0.1)):
        watch = _Watch(trial, plan(), lambda: False)
        watch.on_checkpoint(None, report(0, value))
        watch.on_checkpoint(None, report(1, value))
        assert study.trials[trial.number].intermediate_values == {0: value, 1: value}
        assert trial.user_attrs["round"] == 1
    with pytest.raises(RunStoppedError):
        _Watch(bad, plan(), lambda: False).on_checkpoint(None, report(0, 0.1))


def test_worst_client_may_be_the_objective(study):
    trial = study.ask()
    trial.set_user_attr("default", True)
    _Watch(trial, plan("pro/worst"), lambda: False).on_checkpoint(None, report(0, 0.9))
    assert study.trials[trial.number].intermediate_values == {0: 0.0}


def test_mean_over_products_may_be_the_objective(study):
    trial = study.ask()
    trial.set_user_attr("default", True)
    by_product = report(0, 0.9)
    by_product.metrics["pro"]["product_mean"] = 0.7
    _Watch(trial, plan("pro/product_mean"), lambda: False).on_checkpoint(None, by_product)
    assert study.trials[trial.number].intermediate_values == {0: 0.7}
    assert objective_value({"last": by_product.metrics}, "pro/product_mean") == 0.7
    with pytest.raises(PlanError, match="objective 'pro/product_mean': this run knows no products; give pro"):
        _Watch(trial, plan("pro/product_mean"), lambda: False).on_checkpoint(None, report(1, 0.9))


@pytest.mark.parametrize(("rounds", "bytes_"), [(2, 10.0), (1, 20.0), (0, 20.0)])
def test_bytes_are_those_of_all_exchanges_over_the_rounds(rounds, bytes_):
    result = {"rounds": rounds, "bytes_up": [1, 2, 3], "bytes_down": [4, 5, 5]}
    assert objective_value(result, "bytes") == bytes_


def test_a_number_of_ones_own_callback_may_be_the_objective(study):
    trial = study.ask()
    _Watch(trial, plan("extras/mine"), lambda: False).on_checkpoint(None, report(0, 0.9))
    assert study.trials[trial.number].intermediate_values == {}
    assert objective_value({"mine": 0.25}, "extras/mine") == 0.25
    assert objective_value({"mine": None}, "extras/mine") is None  # no finite number: the trial fails
    for result in ({}, {"mine": [0.25]}, {"mine": True}):
        with pytest.raises(
            UserError, match=r"^objective 'extras/mine': no callback .* run\.extras\['mine'\]"
        ):
            objective_value(result, "extras/mine")


def test_divergence_and_a_wrong_objective_are_told_apart(study):
    with pytest.raises(UserError, match="pro is undefined after round 2"):
        _Watch(study.ask(), plan(), lambda: False).on_checkpoint(None, report(2, float("nan")))
    with pytest.raises(PlanError, match="objective 'accuracy' is not measured here; one of pro, bytes"):
        _Watch(study.ask(), plan("accuracy"), lambda: False).on_checkpoint(None, report(0, 0.5))


@pytest.mark.slow
def test_real_trial_is_given_back_continues_and_can_be_pruned(study_file, tmp_path, capsys, monkeypatch):
    """Two real runs: the default leaves after round 1 and goes on at round 2; the other is pruned after round 0."""
    options = [f"study={study_file}", f"out={tmp_path / 'study'}", "n_trials=2", "fabric.accelerator=cpu"]
    options += [f"data.root={tmp_path / 'data'}", "data.size=64", f"cache.folder={tmp_path / 'cache'}"]
    played = []
    play = Federation.play
    monkeypatch.setattr(Federation, "play", lambda self, n: (played.append(n), play(self, n))[1])

    def real(trial, plan, folder, leaving):
        again = trial.user_attrs.get("given_back", 0)
        own = (lambda: len(played) == 4) if trial.user_attrs.get("default") and not again else leaving
        if trial.user_attrs.get("default"):
            return play_trial(trial, plan, folder, own, {})
        monkeypatch.setattr(optuna.Trial, "should_prune", lambda self: True)
        return play_trial(trial, plan, folder, leaving, {})

    sweep(options, Display(), real)
    study = optuna.load_study(study_name="study", storage=open_storage("journal", tmp_path / "study"))
    assert [trial.state.name for trial in study.trials] == ["FAIL", "COMPLETE", "PRUNED"]
    folders = [trial.user_attrs["folder"] for trial in study.trials]
    assert folders == ["trial_0", "trial_0", "trial_1"]
    first, resumed = played[:4], played[4:-3]
    assert first + resumed == sorted({*first, *resumed})  # no round twice, none left out
    assert study.trials[1].intermediate_values.keys() == {0, 1, 2}
    result = RunFolder(tmp_path / "study" / "trial_0").result()
    assert study.trials[1].values == [result["last"]["pro"]["mean"]]
    assert RunFolder(tmp_path / "study" / "trial_1").result() is None
    assert "pruned, round 0" in capsys.readouterr().out
