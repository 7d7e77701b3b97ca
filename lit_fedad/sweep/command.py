"""Joins a study as a worker, or shows it: ``lit-fedad sweep``."""

from __future__ import annotations

import socket
import uuid
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import optuna
import pandas as pd
from filelock import FileLock
from matplotlib import pyplot, rc_context
from optuna import Study
from optuna.exceptions import ExperimentalWarning
from optuna.storages import BaseStorage
from optuna.trial import FrozenTrial, TrialState
from optuna.visualization import matplotlib as drawn

from lit_fedad.contracts.randomness import derive_seed
from lit_fedad.core.errors import UserError
from lit_fedad.core.files import atomic, check_own, stored_text, unwritable_in_one_line
from lit_fedad.core.text import csv_cell
from lit_fedad.report.console import Display, each_warning_once
from lit_fedad.sweep.plan import Plan, read_plan
from lit_fedad.sweep.storage import attempts, check_trials, last_attempts, open_storage
from lit_fedad.sweep.trial import DEFAULT, play_trial
from lit_fedad.sweep.worker import Registry, Worker, refuse_failures
from lit_fedad.tracking.sender import Delivery, where_compared
from lit_fedad.tracking.tracker import Tracker

# Attributes of a study: its folder, the first host, the plan, the MLflow run, and how many trials the results show.
_FOLDER, _HOST, _PLAN, _PARENT, _SHOWN = "folder", "host", "plan", "mlflow_run", "shown"


@dataclass(frozen=True)
class SweepOptions:
    """Options of ``lit-fedad sweep``.

    Attributes:
        study: Name of a file in ``sweeps/``, or the path of another study file.
        n_trials: How many trials the study should have; 0 only shows it; None for the number in its file.
        storage: ``journal`` (a file in the study's folder), a database's URL, or ``grpc://HOST:PORT``.
        seed: Seed of the sampler.
        out: The study's folder; None for ``outputs/sweeps/STUDY``.

    Raises:
        UserError: If a number is too small.
    """

    study: str
    n_trials: int | None = None
    storage: str = "journal"
    seed: int = 0
    out: str | None = None

    def __post_init__(self) -> None:
        for key in ("n_trials", "seed"):
            value = getattr(self, key)
            if value is not None and value < 0:
                raise UserError(f"{key}={value} must be at least 0")

    @property
    def folder(self) -> Path:
        """The study's folder."""
        return Path(self.out or f"outputs/sweeps/{Path(self.study).stem}")


def sweep(options: SweepOptions, overrides: Sequence[str], display: Display) -> None:
    """Joins a study as a worker, or begins it; start as many as you like. ``n_trials=0`` shows it.

    Args:
        options: The study, and how this worker joins it.
        overrides: Overrides of the study's base configuration.
        display: Shows the progress and the results.

    Raises:
        UserError: For bad input, before anything runs; and if all trials fail.
    """
    plan = read_plan(options.study, overrides)
    if options.n_trials is None:
        options = replace(options, n_trials=plan.trials)
    if options.n_trials == 0 and not (options.folder / "claim.lock").exists():
        raise UserError(f"out={options.folder}: there is no study to show")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExperimentalWarning)
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        _work(plan, options, display)


def _work(plan: Plan, options: SweepOptions, display: Display) -> None:
    """Plays trials as a worker if ``n_trials`` is not 0, then writes and shows the study's results."""
    out, n_trials = options.folder, options.n_trials
    with unwritable_in_one_line(f"out={out}"):
        out.mkdir(parents=True, exist_ok=True)
    lock = FileLock(check_own(out / "claim.lock"))
    with lock:
        # Opened under the lock: two workers that create a database's tables at once would fail.
        storage = open_storage(options.storage, out)
        study = _join(plan, out, storage, options.storage.startswith("sqlite"), display)
        check_trials(study, len(plan.objectives))
    if n_trials:
        with lock:
            registry = Registry(out / "workers")
        study.sampler = plan.make_sampler(derive_seed(options.seed, "sampler", registry.number))
        begun = sum(trial.state != TrialState.WAITING for trial in last_attempts(study).values())
        display.note(
            f"worker {registry.number} of study {study.study_name}, {begun} of {n_trials} trials begun: {out}"
        )
        play = partial(play_trial, tracking=_trial_tracking(study, plan))
        worker = Worker(study, plan, out, n_trials, registry, lock, play, display)
        with each_warning_once():
            worker.run()
        if worker.leaving.is_set():
            display.note("this worker leaves; the same command joins again")
            return
    with lock:
        _finish(study, plan, out, display, anew=not n_trials)
    show(study, plan, display)
    display.where_next([("files", str(out)), *where_compared([out])])
    refuse_failures([trial for trial in last_attempts(study).values() if trial.state.is_finished()])


def _join(plan: Plan, out: Path, storage: BaseStorage, one_host: bool, display: Display) -> Study:
    """Begins the study, or joins it; the study's lock must be held. Only one host can join if `one_host`.

    Raises:
        UserError: If the storage holds another study under this name, or this host may not join.
    """
    study = optuna.create_study(
        study_name=out.resolve().name,
        storage=storage,
        pruner=plan.make_pruner(),
        directions=list(plan.objectives.values()),
        load_if_exists=True,
    )
    folder_id, attributes = check_own(out / "study.id"), study.user_attrs
    if not attributes.get(_PLAN):
        if (out / "workers" / "0.worker").exists():  # a study has begun in this folder
            raise UserError(
                f"out={out}: the storage holds no study of this folder; give the storage= that it was begun with, or"
                " another out=DIR"
            )
        if not folder_id.exists():
            folder_id.write_text(uuid.uuid4().hex)
        study.set_user_attr(_FOLDER, stored_text(folder_id))
        study.set_user_attr(_HOST, socket.gethostname())
        _begin(study, plan, out, display)
        # Set last: if this worker is killed before, the next one begins the study anew.
        study.set_user_attr(_PLAN, plan.fingerprint())
        return study
    if not folder_id.exists() or stored_text(folder_id) != attributes.get(_FOLDER):
        raise UserError(
            f"out={out}: the storage holds a study '{study.study_name}' that works in another folder;"
            " all workers of a study share one, and another study needs an out of another name"
        )
    directions = [direction.name.lower() for direction in study.directions]
    if attributes[_PLAN] != plan.fingerprint() or directions != [*plan.objectives.values()]:
        raise UserError(
            f"out={out}: its study has another base, search space or objective; give another out=DIR"
        )
    if one_host and attributes.get(_HOST) != socket.gethostname():
        raise UserError(
            f"storage=sqlite: this study belongs to host {attributes.get(_HOST)}; for several hosts give"
            " postgresql://..., mysql://... or grpc://HOST:PORT"
        )
    return study


def _begin(study: Study, plan: Plan, out: Path, display: Display) -> None:
    """Queues the trial with the base experiment's own values, and logs the study as an MLflow run."""
    defaults = plan.defaults()
    if defaults is None:
        display.warn("the base experiment's own values lie outside the search space: no trial runs them")
    else:
        study.enqueue_trial(defaults, user_attrs={DEFAULT: True}, skip_if_exists=True)
    delivery = _track(study, plan, out, "RUNNING")
    if delivery.pending:
        display.warn("MLflow does not answer: the trials' runs will not be listed under the study's")
    study.set_user_attr(_PARENT, delivery.run_id)


def _finish(study: Study, plan: Plan, out: Path, display: Display, anew: bool) -> None:
    """Writes tables and figures, unless another worker has written them for the same ended trials and not `anew`."""
    trials = last_attempts(study).values()
    ended = sum(trial.state.is_finished() for trial in trials)
    if study.user_attrs.get(_SHOWN) == ended and not anew:
        return
    files = write_results(study, plan, out)
    running = any(trial.state == TrialState.RUNNING for trial in trials)
    delivery = _track(study, plan, out, "RUNNING" if running else "FINISHED", files)
    if delivery.kept:
        display.warn(f"{delivery.kept} tracking records are kept in {out}; n_trials=0 sends them")
    study.set_user_attr(_SHOWN, ended)


def _track(study: Study, plan: Plan, out: Path, status: str, files: Iterable[Path] = ()) -> Delivery:
    """Logs the study as an MLflow run, under which the runs of its trials are listed."""
    method, tracking = plan.base_config["method"], plan.base_config["tracking"]
    tracker = Tracker(
        out,
        experiment=_trial_tracking(study, plan)["experiment"],
        run_name=study.study_name,
        tags={"study": study.study_name, "method": method["name"], "paper": method["paper"]},
        uri=tracking["uri"],
        enabled=tracking["enabled"],
        parent_run_id=tracking["parent"],
    )
    space = {key: str(distribution) for key, distribution in plan.distributions.items()}
    tracker.params({"base": " ".join(plan.base), "objectives": plan.objectives, "space": space})
    for file in files:
        tracker.artifact(file, folder="figures" if file.suffix == ".png" else "")
    return tracker.close(status)


def _trial_tracking(study: Study, plan: Plan) -> dict[str, Any]:
    """Returns the settings of tracking for trials: the MLflow experiment and the parent run."""
    experiment = plan.base_config["tracking"]["experiment"] or f"sweep_{study.study_name}"
    return {"experiment": experiment, "parent": study.user_attrs.get(_PARENT)}


def trials_frame(study: Study, plan: Plan) -> pd.DataFrame:
    """Builds the table of trials: a row for each trial, which describes its last attempt."""
    rows = []
    for name, trial in last_attempts(study).items():
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
    """Writes the table of trials and the figures that Optuna can draw of them; returns the files."""
    table = out / "trials.csv"
    with atomic(table) as partial_file:
        trials_frame(study, plan).map(csv_cell).to_csv(partial_file, index=False)
    files = [table]
    for name, draw in _figures(study, plan).items():
        file = out / "figures" / f"{name}.png"
        # Some cannot be drawn: importance needs two trials whose values differ, few take lists, none a broken formula.
        with rc_context(), warnings.catch_warnings(), suppress(RuntimeError, ValueError, TypeError):
            warnings.simplefilter("ignore")
            axes = draw()
            figure = (axes.flat[0] if hasattr(axes, "flat") else axes).figure
            with atomic(file) as png:  # a tight box, since names of keys are longer than the usual margins
                figure.savefig(png, format="png", dpi=150, bbox_inches="tight", metadata={"Software": None})
            files.append(file)
        pyplot.close("all")  # Optuna draws with pyplot, which would keep the figures in memory
    return files


def show(study: Study, plan: Plan, display: Display) -> None:
    """Prints the best trials and, to compare, the trial with the default values."""
    trials = last_attempts(study)
    states = [trial.state for trial in trials.values()]
    counts = ", ".join(
        f"{states.count(state)} {state.name.lower()}" for state in TrialState if states.count(state)
    )
    repeats = sum(len(attempts(trial)) - 1 for trial in trials.values())
    display.note(f"{len(trials)} trials: {counts}" + (f"; passed on {repeats} times" if repeats else ""))
    complete = {name: trial for name, trial in trials.items() if trial.state == TrialState.COMPLETE}
    if not complete:
        return
    # With several objectives, several trials can be best; with one, the first of equal trials is enough.
    best = {trial.number for trial in study.best_trials[: None if len(plan.objectives) > 1 else 1]}
    default = [name for name, trial in complete.items() if trial.user_attrs.get(DEFAULT)]
    rows = [_row(plan, name, complete[name], "default") for name in default]
    rows += [_row(plan, name, trial, "best") for name, trial in complete.items() if trial.number in best]
    display.table(rows)
    if default and len(plan.objectives) == 1:
        gain = abs(study.best_value - complete[default[0]].values[0])
        display.note(
            f"the best is better than the default by {gain:.4g}"
            if gain
            else "no trial is better than the default"
        )


def _row(plan: Plan, name: int, trial: FrozenTrial, rank: str) -> dict[str, str]:
    """Describes a complete trial as a row of the table of the best trials."""
    values = {m: f"{v:.6g}" for m, v in zip(plan.objectives, trial.values, strict=True)}
    drawn_values = {key: trial.params.get(key) for key in plan.space}
    params = {
        key: f"{value:.4g}" if isinstance(value, float) else "null" if value is None else str(value)
        for key, value in drawn_values.items()
    }
    return {"": rank, "trial": str(name), **values, **params}


def _figures(study: Study, plan: Plan) -> dict[str, Callable[[], Any]]:
    """Returns the functions that draw the figures, by the figure's name."""
    figures: dict[str, Callable[[], Any]] = {}
    metrics = list(plan.objectives)
    for number, (metric, direction) in enumerate(plan.objectives.items()):
        ending = f"_{metric.replace('/', '_')}" if len(metrics) > 1 else ""
        of_metric = {"target": lambda trial, number=number: trial.values[number], "target_name": metric}
        # Of a given target Optuna takes low values for the good ones, whatever the study's direction.
        sign = 1 if direction == "minimize" else -1
        low = of_metric | {"target": lambda trial, number=number, sign=sign: sign * trial.values[number]}
        figures[f"importance{ending}"] = partial(drawn.plot_param_importances, study, **low)
        figures[f"slices{ending}"] = partial(drawn.plot_slice, study, **of_metric)
    if len(metrics) > 1:
        figures["pareto_front"] = partial(drawn.plot_pareto_front, study, target_names=metrics)
    else:
        figures["history"] = partial(drawn.plot_optimization_history, study, target_name=metrics[0])
        figures["rounds"] = partial(drawn.plot_intermediate_values, study)
    return figures
