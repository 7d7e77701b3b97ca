"""What a study came to, against trials whose values are given."""

import matplotlib
import optuna
import pandas as pd
import pytest
from matplotlib import pyplot
from optuna.distributions import CategoricalDistribution, FloatDistribution
from optuna.trial import TrialState, create_trial
from optuna.visualization import matplotlib as drawn

from lit_fedad.report.console import Display
from lit_fedad.sweep.command import show, write_results
from lit_fedad.sweep.plan import Dimension, Plan

SPACE = {
    "task.slots": Dimension("categorical", choices=[None, 16]),
    "lr": Dimension("float", 1e-5, 1e-2, log=True),
}


def make(objectives, rows):
    """A study and its plan; each row: slots, lr, values (None: failed), user attributes."""
    plan = Plan([], objectives, SPACE, {}, len(rows))
    study = optuna.create_study(directions=list(objectives.values()))
    distributions = {
        "task.slots": CategoricalDistribution([None, 16]),
        "lr": FloatDistribution(1e-5, 1e-2, log=True),
    }
    for slots, rate, values, attributes in rows:
        study.add_trial(
            create_trial(
                state=TrialState.COMPLETE if values else TrialState.FAIL,
                values=values,
                params={"task.slots": slots, "lr": rate},
                distributions=distributions,
                user_attrs=attributes,
            )
        )
    return study, plan


@pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")
@pytest.mark.slow
def test_pareto_front_of_two_objectives(tmp_path, capsys):
    rows = [
        (None, 1e-4, [0.5, 100.0], {"default": True}),
        (16, 1e-3, [0.4, 10.0], {}),
        (16, 1e-4, [0.3, 20.0], {}),  # worse and dearer than the one before
        (None, 1e-3, [0.6, 100.0], {}),
    ]
    study, plan = make({"pro": "maximize", "bytes": "minimize"}, rows)
    names = {path.name for path in write_results(study, plan, tmp_path)}
    assert {"trials.csv", "pareto_front.png", "importance_pro.png", "slices_bytes.png"} <= names
    assert all((tmp_path / "figures" / name).stat().st_size > 0 for name in names - {"trials.csv"})
    show(study, plan, Display())
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines if line.startswith(("default", "best"))] == [
        ["default", "0"],
        ["best", "1"],
        ["best", "3"],
    ]


@pytest.mark.parametrize("direction", ["maximize", "minimize"])
def test_importances_are_asked_for_good_values(tmp_path, monkeypatch, direction):
    """Optuna takes low values of a given target for the good ones, whatever the study's direction."""
    targets = []

    def draw(study, target, target_name):
        targets.append(target)
        raise ValueError("nothing is drawn")

    monkeypatch.setattr(drawn, "plot_param_importances", draw)
    study, plan = make(
        {"pro": direction}, [(16, 10.0**-n, [value], {}) for n, value in ((2, 0.5), (3, 0.75))]
    )
    write_results(study, plan, tmp_path)
    (target,) = targets
    assert target(study.best_trial) == min(map(target, study.trials))


def test_table_and_curve_of_one_objective(tmp_path, capsys):
    rows = [
        (16, 1e-4, [0.5], {"default": True}),
        (16, 1e-3, None, {"cause": "pro is undefined after round 2"}),
        (16, 1e-5, [0.75], {}),
        (16, 1e-2, [0.625], {}),
    ]
    study, plan = make({"pro": "maximize"}, rows)
    write_results(study, plan, tmp_path)
    table = pd.read_csv(tmp_path / "trials.csv", index_col="trial")
    assert table.loc[1, "cause"] == "pro is undefined after round 2"
    assert table["pro"].dropna().to_dict() == {0: 0.5, 2: 0.75, 3: 0.625}
    show(study, plan, Display())
    text = capsys.readouterr().out
    assert "4 trials: 3 complete, 1 fail" in text
    assert "the best is better than the default by 0.25" in text


def test_a_default_that_nothing_beats_is_said_to_be_the_best(capsys):
    study, plan = make({"pro": "maximize"}, [(16, 1e-4, [0.5], {"default": True}), (16, 1e-3, [0.25], {})])
    show(study, plan, Display())
    assert capsys.readouterr().out.endswith("no trial is better than the default\n")


@pytest.mark.filterwarnings("ignore:Choices for a categorical distribution")
@pytest.mark.parametrize("choices", [[[2], [2, 3]], ["$5_$6", "b"]])
def test_values_that_no_figure_takes_cost_its_figure_alone(tmp_path, choices):
    plan = Plan([], {"pro": "maximize"}, {"layers": Dimension("categorical", choices=choices)}, {}, 4)
    study = optuna.create_study(direction="maximize")
    for number, choice in enumerate(choices * 2):
        distributions = {"layers": CategoricalDistribution(choices)}
        trial = create_trial(value=number / 4, params={"layers": choice}, distributions=distributions)
        study.add_trial(trial)
    style = dict(matplotlib.rcParams)
    names = {path.name for path in write_results(study, plan, tmp_path)}
    assert (pyplot.get_fignums(), dict(matplotlib.rcParams)) == ([], style)
    assert {"trials.csv", "history.png"} <= names
    assert "slices.png" not in names
    assert {path.name for path in (tmp_path / "figures").iterdir()} == names - {"trials.csv"}
