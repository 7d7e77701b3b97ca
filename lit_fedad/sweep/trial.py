"""Plays a trial of a study as an ordinary run, and reports its metrics to Optuna."""

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
from lit_fedad.sweep.plan import BYTES, Plan, metric_value, objective_value
from lit_fedad.sweep.worker import GivenBackError, PlanError, PrunedError

DEFAULT = "default"


def play_trial(
    trial: Trial, plan: Plan, folder: Path, leaving: Callable[[], bool], tracking: Mapping[str, Any]
) -> list[float]:
    """Runs a trial, or what is left of it.

    Returns:
        A value an objective.

    Raises:
        PrunedError: If the study's pruner ends it.
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
        """Judges the round."""
        self.trial.set_user_attr("round", report.round)  # refused where another worker has the trial by now
        if report.metrics is not None:
            self._judge(report.round, report.metrics)
        if self.leaving():
            raise RunStoppedError(f"round {report.round}, its worker was asked to stop")

    def _judge(self, round: int, metrics: Mapping[str, Any]) -> None:
        try:
            values = [None if metric == BYTES else metric_value(metrics, metric) for metric in self.metrics]
        except UserError as error:
            raise PlanError(str(error)) from None
        if len(self.metrics) > 1 or self.metrics[0] == BYTES:
            return
        self.trial.report(_value(self.metrics[0], values[0], round), round)
        # The default runs to its end: how far it is from the best must be known.
        if not self.trial.user_attrs.get(DEFAULT) and self.trial.should_prune():
            self.pruned = True
            raise RunStoppedError(f"round {round}")


def _value(metric: str, value: float | None, round: int) -> float:
    if value is None or not math.isfinite(value):
        raise UserError(f"{metric} is undefined after round {round}")
    return value
