"""The content of a run's ``result.json``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lit_fedad.experiment.run import Run
from lit_fedad.federation.evaluator import Evaluator
from lit_fedad.federation.loop import Federation
from lit_fedad.federation.round_report import RoundReport


def summarise_run(run: Run, peak_rss_bytes: int) -> dict[str, Any]:
    """Summarises a run after its last round."""
    config = run.config
    return {
        "method": config["method"]["name"],
        "task": type(run.model.task).__name__,
        **run.data.section(config),
        "models_stay": not run.federation.evaluator.common and not run.model.client.predictors.shared,
        "backbone": run.model.provenance,
        "seed": config["seed"],
        "rounds": config["rounds"],
        "milestones": sorted(run.data.module.milestones),
        **summarise_history(run.federation, run.rates),
        "peak_rss_bytes": peak_rss_bytes,
        "config": config,
        "tracking_run_id": None,
        "privacy": None,
        "differential_privacy": run.federation.privacy,
        **run.extras,
    }


def summarise_history(federation: Federation, rates: Mapping[str, Any]) -> dict[str, Any]:
    """Summarises the rounds of a federation: metrics of the first, last and best, traffic, scalars, failures."""
    history, names = federation.history, federation.evaluator.metrics
    evaluated = [report for report in history if report.metrics is not None]
    best = max(evaluated, key=lambda r: _sortable((r.metrics or {})[names[0]]["mean"]))
    chosen: dict[str, tuple[RoundReport, Mapping[str, Any]]] = {
        "first": (evaluated[0], {}),
        "last": (evaluated[-1], rates),
        "best": (best, {}),
    }
    return {
        **{w: {"round": r.round, **_metrics(r, names), **own} for w, (r, own) in chosen.items()},
        "exchanges": [r.round for r in history],
        "exchange_names": [r.exchange for r in history],
        "bytes_up": [sum(r.bytes_up.values()) for r in history],
        "bytes_down": [sum(r.bytes_down.values()) for r in history],
        "elements_up": [sum(r.elements_up.values()) for r in history],
        "seconds_per_round": [r.seconds for r in history],
        "scalars": [r.scalars for r in history],
        "client_losses": [
            {str(client): own["loss"] for client, own in r.per_client.items() if "loss" in own}
            for r in history
        ],
        "metrics": {
            r.round: {name: r.metrics[name]["mean"] for name in r.metrics} for r in evaluated if r.metrics
        },
        "constants": _constants(federation.evaluator, [report.round for report in evaluated]),
        "failures": {r.round: r.failures for r in history if r.failures},
        "unscored": {r.round: r.unscored for r in history if r.unscored},
        "refused": {r.round: r.refused for r in history if r.refused},
    }


def _metrics(report: RoundReport, names: Sequence[str]) -> dict[str, Any]:
    undefined: dict[str, Any] = {"mean": None, "worst": None, "pooled": None, "per_client": {}}
    return {name: (report.metrics or {}).get(name, undefined) for name in names}


def _constants(evaluator: Evaluator, rounds: Sequence[int]) -> dict[str, dict[int, dict[str, float]]]:
    """Returns what constant predictions reach, by predictor, round and metric; empty where there are none."""
    found = {round: evaluator.constants(round) for round in rounds}
    return {name: {round: found[round][name] for round in rounds} for name in found[rounds[-1]]}


def _sortable(value: float) -> float:
    return value if value == value else float("-inf")
