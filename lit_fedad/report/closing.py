"""Last lines of a run on the console: its main metrics, explained, beside a client alone and guesses without images."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from lit_fedad.core.client_names import NUMBERS, ClientNames
from lit_fedad.report.naming import METRIC_TITLES, metric_family, metric_text, metric_title, promised_text

_MAIN_METRICS = ("i_auroc", "pro", "false_alarm_rate", "miss_rate")
_MAX_ROWS = 4
_EXPLANATIONS = {
    "i_auroc": "ranks images: higher is better, 0.5 is chance",
    "auroc": "ranks images: higher is better, 0.5 is chance",
    "pro": "outlines defects: higher is better",
    "false_alarm_rate": "of normal images: lower is better",
    "miss_rate": "of defective images: lower is better",
    "fe": "1 - precision: lower is better",
    "me": "1 - recall: lower is better",
    "fe_calibrated": "lower is better",
    "me_calibrated": "lower is better",
    "forgetting": "lower is better",
    "accuracy": "images whose class is right: higher is better",
    "own_accuracy": "the same for classes as frequent as a client's own",
    "balanced_accuracy": "the same, mean over classes",
    "predicted_classes": "of all test images: 1 is a constant prediction",
    "selection_accuracy": "of the round's clients, classes met so far: higher is better",
    "global_accuracy": "of the server's model: higher is better",
    "local_accuracy": "of each client's model: higher is better",
    "incremental_accuracy": "mean over the stages so far: higher is better",
}


def closing_rows(result: Mapping[str, Any]) -> list[dict[str, str]]:
    """Lists the at most four metrics that tell most of a run's last round, each with an explanation."""
    last, alone = result["last"], result.get("alone", {}).get("metrics")
    columns = {"together": (last, "mean"), "worst client": (last, "worst")}
    if alone:
        columns = {"alone": (alone, "mean"), **columns}
    return [
        {
            "last round": metric_title(name),
            **{head: metric_text(values.get(name, {}).get(kind)) for head, (values, kind) in columns.items()},
            "what it tells": _explanation(name, result),
        }
        for name in _shown_metrics(last)
    ]


def in_words(result: Mapping[str, Any]) -> list[str]:
    """Says what the shipped decisions find, and what clients find together and alone; no line where it is unknown.

    Example:
        >>> rates = {"false_alarm_rate": {"mean": 0.012}, "miss_rate": {"mean": 0.2}}
        >>> found = {"together": {"all": 0.63, "own": 0.82}, "alone": {"all": 0.05, "own": 0.78}}
        >>> for line in in_words({"last": rates, "alone": {"found": found, "at_false_alarms": 0.05}}): print(line)
        as shipped, finds 80 of 100 defects of a client's own products at 1 false alarm in 100 normal images
        compared at up to 5 false alarms in 100 normal images: finds 63 of 100 defects of all products, a client alone \
5; of a client's own products 82, a client alone 78
    """
    lines, last = [], result["last"]
    misses, alarms = (last.get(name, {}).get("mean") for name in ("miss_rate", "false_alarm_rate"))
    if _known(alarms) and not (_known(misses) and math.isclose(misses, 1)):
        shipped = _shipped(result)
        interval, promised = shipped.get("false_alarm_interval"), shipped.get("promised")
        finds = ""
        if _known(misses):  # classes as anomalies belong to no product
            kind = "images of foreign classes" if "auroc" in last else "defects of a client's own products"
            finds = f"finds {_of_100(1 - misses)} of 100 {kind} at "
        lines.append(
            f"as shipped, {finds}{_alarms(alarms)}"
            + (f" (95 % interval {_of_100(interval[0])} to {_of_100(interval[1])})" if interval else "")
            + (f", at most {100 * promised['mean']:.3g} promised" if promised else "")
        )
    if alone := result.get("alone"):
        many, single = alone["found"]["together"], alone["found"]["alone"]
        lines.append(
            f"compared at up to {_alarms(alone['at_false_alarms'])}: finds {_of_100(many['all'])} of 100 defects of all"
            f" products, a client alone {_of_100(single['all'])}"
        )
        if _known(many["own"]) and _known(single["own"]):
            lines[-1] += (
                f"; of a client's own products {_of_100(many['own'])}, a client alone {_of_100(single['own'])}"
            )
    return lines


def _alarms(rate: float) -> str:
    number = _of_100(rate)
    return f"{number or 'no'} false alarm{'s' * (number != 1)} in 100 normal images"


def _shown_metrics(last: Mapping[str, Any]) -> Sequence[str]:
    measured = [name for name, values in last.items() if name != "round" and _known(values.get("mean"))]
    if "i_auroc" in last:
        return [name for name in _MAIN_METRICS if name in measured] or ["i_auroc"]
    ordered = dict.fromkeys([*METRIC_TITLES, *measured])
    return [name for name in ordered if name in measured and not metric_family(name)][:_MAX_ROWS]


def _explanation(name: str, result: Mapping[str, Any]) -> str:
    words = _EXPLANATIONS.get(name, "higher is better")
    if name != "false_alarm_rate":
        return words
    shipped = _shipped(result)
    if _promises_nothing(shipped):
        return f"{words}; nothing is promised, and no image called anomalous"
    if promised := shipped.get("promised"):
        by_client = promised_text([promised["lowest"], promised["highest"]])
        return f"{words}, at most {promised['mean']:.3g} promised" + f" ({by_client})" * (
            "client" in by_client
        )
    return words


def _promises_nothing(shipped: Mapping[str, Any]) -> bool:
    """Tells whether every client has too few calibration images to promise anything about any product."""
    clients = shipped.get("clients", {}).values()
    return bool(clients) and all(
        0 < len(decisions["products"]) == len(decisions["without_promise"]) for decisions in clients
    )


def _shipped(result: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the decisions that a run ships; empty where it ships none."""
    shipped: Mapping[str, Any] = next(iter(result.get("decisions", {}).values()), {})
    return shipped


def _of_100(share: float) -> int:
    return round(100 * share)


def _known(value: Any) -> bool:
    return value is not None and math.isfinite(value)


_MAX_NAMED = 10

CONSTANT_LABELS = {
    "client_largest": "always the client's largest class",
    "global_largest": "always the largest class of all clients",
    "random": "a class of the client's at random",
}
"""Label of each constant prediction (`CONSTANTS`), by its name in results."""


def looking_at_nothing(result: Mapping[str, Any]) -> str | None:
    """Says which accuracy constant predictions, which look at no image, have after the last round.

    Returns:
        One line; None for a result without such accuracies.
    """
    if not result.get("constants"):
        return None
    accuracies = {name: values[str(result["last"]["round"])] for name, values in result["constants"].items()}
    first = next(iter(accuracies.values()))
    metric = "own_accuracy" if "own_accuracy" in first else next(iter(first))
    parts = [f"{CONSTANT_LABELS[name]} {values[metric]:.3f}" for name, values in accuracies.items()]
    return f"Without a look at images, {metric_title(metric)}: {', '.join(parts)}."


def constant_predictions(metrics: Mapping[str, Any], names: ClientNames = NUMBERS) -> str | None:
    """Names the clients that predict a single class for every test image.

    Returns:
        One line; None if no client does.

    Example:
        >>> constant_predictions({"predicted_classes": {"per_client": {0: 1.0, 1: 4.0}}})
        "client 0 predicts a single class for every test image; its accuracy is that class's share"
        >>> constant_predictions({"predicted_classes": {"per_client": {0: 2.0, 1: 4.0}}})
    """
    classes_of: Mapping[Any, float] = metrics.get("predicted_classes", {}).get("per_client", {})
    clients = [int(client) for client, classes in classes_of.items() if classes == 1]
    if not clients:
        return None
    named = ", ".join(map(names.label, clients[:_MAX_NAMED])) + (", ..." if len(clients) > _MAX_NAMED else "")
    if len(clients) == 1:
        who = f"{names.title(clients[0])} predicts"
    elif len(clients) == len(classes_of):
        who = f"all {len(clients)} clients predict"
    else:
        who = f"{len(clients)} of {len(classes_of)} clients ({named}) predict"
    whose = "its" if len(clients) == 1 else "their"
    return f"{who} a single class for every test image; {whose} accuracy is that class's share"
