"""Calibrates a run's decisions, and judges them on its test images."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from lit_fedad.core.client_names import ClientNames
from lit_fedad.core.config import Config
from lit_fedad.data.labelled import LabelledSet
from lit_fedad.evaluation.calibration import CalibrationQuery, calibrate, calibration_scores
from lit_fedad.evaluation.decisions import (
    EvaluatedImages,
    Rate,
    decide,
    mean_interval,
    product_rates,
    promised_rates,
    summarise_rates,
)
from lit_fedad.evaluation.predict import Predicted
from lit_fedad.experiment.run import Run
from lit_fedad.experiment.run_data import Data
from lit_fedad.experiment.run_files import save_json
from lit_fedad.metrics.conformal import USUAL_RATE, Alpha, Calibration, needed_images
from lit_fedad.report.naming import promised_text

_FIGURE_RATES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5)
"""Promised rates of false alarms for which the figure shows decisions."""


def judge(run: Run) -> None:
    """Calibrates all clients after the last round, and judges their decisions; in every process.

    Sets `Run.calibration`, `Run.predictions` and `Run.decisions`, and the values that `ship` sets.
    """
    federation, config, data = run.federation, run.config, run.local
    scores = calibration_scores(
        config, data.images, data.partition, data.module, run.fabric, run.federation.method
    )
    query = CalibrationQuery(data.images.categories, scores)
    run.calibration = calibrate(federation, federation.rounds, query)
    run.predictions = federation.predictions(federation.rounds)
    run.decisions = decisions(run.predictions, config, data, run.calibration, {*run.alphas, *_FIGURE_RATES})
    if run.fabric.is_global_zero:
        ship(run)


def ship(run: Run) -> None:
    """Ships the decisions of a run that has been judged.

    Writes ``calibration.json``, sets `Run.rates`, adds ``decisions`` to ``result.json``, and tells the user where a
    larger rate than the usual one, or none, is promised.
    """
    save_json(run.folder.path, "calibration.json", run.calibration.to_json())
    shipped = run.decisions[run.alphas[0]]
    run.rates = summarise_rates(shipped)
    _report_promises(run, shipped, run.alphas[0])
    run.extras["decisions"] = {
        str(alpha): {  # unrounded, so that two rates that are nearly equal get different names
            **summarise_rates(run.decisions[alpha]),
            "promised": promised_rates(run.decisions[alpha]),
            "false_alarm_interval": mean_interval(run.decisions[alpha]),
            "products": {
                side: {product: rate.to_json() for product, rate in rates.items()}
                for side, rates in product_rates(run.decisions[alpha]).items()
            },
            "clients": {client: _plain(judged) for client, judged in run.decisions[alpha].items()},
        }
        for alpha in run.alphas
    }


def decisions(
    predictions: Mapping[int, Predicted],
    config: Config,
    data: Data,
    calibration: Calibration,
    promised: Iterable[Alpha],
) -> dict[Alpha, dict[int, dict[str, Any]]]:
    """Judges the decisions of all clients on the test images (`decide`), for each promised rate of false alarms."""
    scores = {client: predicted.scores for client, predicted in predictions.items()}
    images = evaluated_images(config, data)
    return {alpha: decide(scores, images, calibration, alpha) for alpha in promised}


def evaluated_images(config: Config, data: Data) -> EvaluatedImages:
    """Describes a run's test images, on which its decisions are judged."""
    images, partition = data.images, data.partition
    calibration = partition.calibration or ((),) * len(partition.clients)
    held = {
        client: Counter(images.train[index].category for index in (*trained, *kept))
        for client, (trained, kept) in enumerate(zip(partition.clients, calibration, strict=True))
    }
    if isinstance(images, LabelledSet):
        normal, labels = images.normal_classes, images.test_labels
        names: Sequence[str | None] = [images.classes[n] if n < normal else None for n in labels.tolist()]
        return EvaluatedImages((labels >= normal).long(), names, held, known=False)
    return EvaluatedImages(
        torch.tensor([sample.label for sample in images.test]),
        [sample.category for sample in images.test],
        held,
        known=config["calibration"]["by"] == "product",
    )


def _plain(judged: Mapping[str, Any]) -> dict[str, Any]:
    """Returns one client's judged decisions as values of a JSON file."""
    products = {product: rate.to_json() for product, rate in judged["products"].items()}
    sides = {side: rate.to_json() for side, rate in judged.items() if isinstance(rate, Rate)}
    others = {name: judged[name] for name in ("held", "without_promise", "promised")}
    return {**sides, "products": products, **others}


def _report_promises(run: Run, judged: Mapping[int, Mapping[str, Any]], alpha: Alpha) -> None:
    """Reports the rates that ``evaluation.alpha=auto`` promises if above the usual, and warns where none is promised.

    Args:
        run: The run.
        judged: Judged decisions by client.
        alpha: The promised rate of false alarms.
    """
    counts = [number for decisions in judged.values() for number in decisions["deciding"] if number]
    rates = [decisions["promised"] for decisions in judged.values() if any(decisions["deciding"])]
    if alpha == "auto" and max(rates, default=0) > USUAL_RATE:
        count_range = " to ".join(dict.fromkeys((str(min(counts)), str(max(counts)))))
        run.display.note(
            f"evaluation.alpha=auto promises {promised_text(rates)}: what {count_range} calibration images allow;"
            f" {USUAL_RATE:g} needs {needed_images(USUAL_RATE)}"
        )
    if silent := [client for client, decisions in judged.items() if decisions["without_promise"]]:
        who, rate = _clients_have(silent, run.federation.names), judged[silent[0]]["promised"]
        if any(number for client in silent for number in judged[client]["deciding"]):
            number = _images_held([judged[client] for client in silent])
            run.display.warn(
                f"evaluation.alpha={rate:g} needs {needed_images(rate)} calibration images, and {who} {number}: what"
                " cannot be promised is not called anomalous; give a larger evaluation.alpha, or more images"
            )
        else:
            run.display.warn(
                f"{who} no calibration images: nothing is promised, and no image called anomalous; give"
                " calibration.share above 0, or more images"
            )


def _images_held(silent: Sequence[Mapping[str, Any]]) -> str:
    """Words the number of calibration images of clients without a promise.

    Returns:
        The largest number of images, if these clients can promise nothing for any product; else the products for which
        they have too few.
    """
    few = list(dict.fromkeys(name for decisions in silent for name in decisions["without_promise"]))
    if all(len(decisions["without_promise"]) == len(decisions["products"]) for decisions in silent):
        return f"at most {max(max(decisions['deciding']) for decisions in silent)}"
    return f"fewer of {', '.join(few[:3])}{' and others' if len(few) > 3 else ''}"


def _clients_have(clients: Sequence[int], names: ClientNames) -> str:
    """Words the beginning of a sentence about what clients have: their names, or for many clients their number."""
    if len(clients) > 8:
        return f"{len(clients)} clients have"
    return f"{', '.join(map(names.title, clients))} {'has' if len(clients) == 1 else 'have'}"
