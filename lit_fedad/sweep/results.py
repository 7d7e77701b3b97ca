"""Writes and shows a study's results: table of trials, figures, the best trials and the default."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib import pyplot
from matplotlib.figure import Figure
from optuna import Study
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState
from optuna.visualization import matplotlib as drawn

from lit_fedad.core.files import atomic
from lit_fedad.core.text import csv_cell
from lit_fedad.report.console import Display
from lit_fedad.sweep.plan import Plan
from lit_fedad.sweep.storage import attempts, standing
from lit_fedad.sweep.worker import DEFAULT


def trials_frame(study: Study, plan: Plan) -> pd.DataFrame:
    """Builds the table of trials, one line a trial, each as its last attempt."""
    rows = []
    for name, trial in standing(study).items():
        values = trial.values or [None] * len(plan.objectives)
        rows.append(
            {
                "trial": name,
                "state": trial.state.name,
                **dict(zip(plan.objectives, values, strict=True)),
                **{key: trial.params.get(key) for key in plan.space},
                "default": bool(trial.user_attrs.get(DEFAULT)),
                "last_round": trial.user_attrs.get("round"),
                "attempts": len(attempts(trial)),
                "worker": trial.user_attrs.get("worker"),
                "folder": trial.user_attrs.get("folder"),
                "began": trial.datetime_start,
                "ended": trial.datetime_complete,
                "cause": trial.user_attrs.get("cause"),
            }
        )
    return pd.DataFrame(rows)


def write_results(study: Study, plan: Plan, out: Path) -> list[Path]:
    """Writes the table of trials, and those figures that the study has enough trials for."""
    table = out / "trials.csv"
    with atomic(table) as part:
        trials_frame(study, plan).map(csv_cell).to_csv(part, index=False)
    files = [table]
    for name, draw in _figures(study, plan).items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                figure = _whole(draw())
            except (
                RuntimeError,
                ValueError,
            ):  # importance: where all values are equal, or there is one trial
                continue
        files.append(out / "figures" / f"{name}.png")
        with atomic(files[-1]) as part:  # cut to what is drawn: names of keys are longer than the margins
            figure.savefig(part, format="png", dpi=150, bbox_inches="tight", metadata={"Software": None})
    return files


def show(study: Study, plan: Plan, display: Display) -> None:
    """Prints the best trials, and the default beside them."""
    trials = standing(study)
    states = [trial.state for trial in trials.values()]
    counts = ", ".join(
        f"{states.count(state)} {state.name.lower()}" for state in TrialState if states.count(state)
    )
    passed = sum(len(attempts(trial)) - 1 for trial in trials.values())
    display.note(f"{len(trials)} trials: {counts}" + (f"; passed on {passed} times" if passed else ""))
    complete = {name: trial for name, trial in trials.items() if trial.state == TrialState.COMPLETE}
    if not complete:
        return
    # Several objectives have several best trials; of equal trials with one objective the first is enough.
    best = {trial.number for trial in study.best_trials[: None if len(plan.objectives) > 1 else 1]}
    default = [name for name, trial in complete.items() if trial.user_attrs.get(DEFAULT)]
    rows = [_row(plan, name, complete[name], "default") for name in default]
    rows += [_row(plan, name, trial, "best") for name, trial in complete.items() if trial.number in best]
    display.table(rows)
    if default and len(plan.objectives) == 1:
        away = abs(study.best_value - complete[default[0]].values[0])
        display.note(f"the default is {away:.4g} from the best")


def best_so_far(study: Study, plan: Plan) -> dict[int, float]:
    """Computes the best value of a study's one objective after each complete trial."""
    better = max if study.directions[0] == StudyDirection.MAXIMIZE else min
    curve: dict[int, float] = {}
    for name, trial in standing(study).items():
        if trial.state == TrialState.COMPLETE:
            curve[name] = better([trial.values[0], *list(curve.values())[-1:]])
    return curve if len(plan.objectives) == 1 else {}


def _row(plan: Plan, name: int, trial: FrozenTrial, rank: str) -> dict[str, str]:
    values = {m: f"{v:.6g}" for m, v in zip(plan.objectives, trial.values, strict=True)}
    params = {
        key: f"{value:.4g}" if isinstance(value, float) else "null" if value is None else str(value)
        for key, value in trial.params.items()
    }
    return {"": rank, "trial": str(name), **values, **params}


def _figures(study: Study, plan: Plan) -> dict[str, Callable[[], Any]]:
    """Names each figure, with the function that draws it."""
    figures: dict[str, Callable[[], Any]] = {}
    metrics = list(plan.objectives)
    for number, metric in enumerate(metrics):
        ending = f"_{metric.replace('/', '_')}" if len(metrics) > 1 else ""
        of_metric = {"target": lambda trial, number=number: trial.values[number], "target_name": metric}
        figures[f"importance{ending}"] = partial(drawn.plot_param_importances, study, **of_metric)
        figures[f"slices{ending}"] = partial(drawn.plot_slice, study, **of_metric)
    if len(metrics) > 1:
        figures["pareto_front"] = partial(drawn.plot_pareto_front, study, target_names=metrics)
    else:
        figures["history"] = partial(drawn.plot_optimization_history, study, target_name=metrics[0])
        figures["rounds"] = partial(drawn.plot_intermediate_values, study)
    return figures


def _whole(axes: Any) -> Figure:
    """Finds the figure of one or several axes, and closes it in pyplot, where Optuna leaves it open."""
    figure = (axes.flat[0] if hasattr(axes, "flat") else axes).figure
    pyplot.close(figure)
    return figure
