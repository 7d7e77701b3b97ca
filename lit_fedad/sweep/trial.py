"""Plays one trial of a study: a run that reports its rounds to Optuna, and that ends early if asked to."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from optuna import Trial

from lit_fedad.core.errors import UserError
from lit_fedad.experiment.track import RunStoppedError
from lit_fedad.experiment.train import train
from lit_fedad.federation.callback import FederationCallback
from lit_fedad.federation.loop import Federation
from lit_fedad.federation.round_report import RoundReport
from lit_fedad.sweep.plan import Plan, is_late, metric_value, objective_value

DEFAULT = "default"  # attribute of the trial that runs the base experiment's own values


class PrunedError(Exception):
    """Raised when the pruner ends a trial."""


class GivenBackError(Exception):
    """Raised when a worker was asked to stop and its trial has a checkpoint, from which another worker can go on."""


class PlanError(UserError):
    """An error in the study file, which every other trial would raise too."""


def play_trial(
    trial: Trial, plan: Plan, folder: Path, leaving: Callable[[], bool], tracking: Mapping[str, Any]
) -> list[float]:
    """Runs a trial, or continues it from its checkpoint; returns one value for each objective.

    Raises:
        PrunedError: If the study's pruner ends the trial.
        GivenBackError: If the worker leaves.
        UserError: If the configuration is refused, or a value is undefined.
    """
    config = plan.config(trial.params)
    config["out"] = str(folder)
    config["tracking"] = {**config["tracking"], **tracking}
    watch = _Watch(trial, plan, leaving)
    try:
        result = train(config, quiet=True, callbacks=[watch])
    except RunStoppedError as stop:
        raise (GivenBackError if leaving() and not watch.pruned else PrunedError)(str(stop)) from stop
    return [_value(metric, objective_value(result, metric), result["rounds"]) for metric in plan.objectives]


class _Watch(FederationCallback):
    """A callback that reports each round to Optuna once its checkpoint is written."""

    def __init__(self, trial: Trial, plan: Plan, leaving: Callable[[], bool]) -> None:
        self.trial, self.metrics, self.leaving = trial, list(plan.objectives), leaving
        self.pruned = False

    def on_checkpoint(self, federation: Federation, report: RoundReport) -> None:
        """Reports the round, and ends the trial if it is pruned or its worker leaves."""
        self.trial.set_user_attr("round", report.round)
        if report.metrics is not None:
            self._judge(report.round, report.metrics)
        if self.leaving():
            raise RunStoppedError(f"round {report.round}, its worker was asked to stop")

    def _judge(self, round: int, metrics: Mapping[str, Any]) -> None:
        try:
            values = [None if is_late(metric) else metric_value(metrics, metric) for metric in self.metrics]
        except UserError as error:
            raise PlanError(str(error)) from None
        if len(self.metrics) > 1 or is_late(self.metrics[0]):
            return
        self.trial.report(_value(self.metrics[0], values[0], round), round)
        # The trial with the default values runs to its end: results compare the best trial with it.
        if not self.trial.user_attrs.get(DEFAULT) and self.trial.should_prune():
            self.pruned = True
            raise RunStoppedError(f"round {round}")


def _value(metric: str, value: float | None, round: int) -> float:
    """Returns a metric's value if it is finite; raises `UserError` if not."""
    if value is None or not math.isfinite(value):
        raise UserError(f"{metric} is undefined after round {round}")
    return value
