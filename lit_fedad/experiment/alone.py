"""Measures the detector that each client would have without the other clients, by the same method."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from lit_fedad.contracts import Task
from lit_fedad.core.config import Config
from lit_fedad.core.errors import UserError
from lit_fedad.data.datamodule import FederatedDataModule
from lit_fedad.data.sample import ImageSet
from lit_fedad.data.stream import StreamDataModule
from lit_fedad.evaluation.anomaly import AnomalyEvaluator, Scored
from lit_fedad.evaluation.decisions import EvaluatedImages, Rate, judged, rates_of
from lit_fedad.experiment.build import build_model
from lit_fedad.experiment.decisions import evaluated_images
from lit_fedad.experiment.federations import build_evaluator, build_federation
from lit_fedad.experiment.run import Run
from lit_fedad.federation.processes import gather, of_this_process, on_first, shard
from lit_fedad.metrics.federated import defined_mean
from lit_fedad.privacy.protection import is_protected
from lit_fedad.tasks.memory_bank import MemoryBank

_ONE_CLIENT = {"min_clients": 1, "fraction": 1.0}  # settings of the sampler
FALSE_ALARMS = 0.05
"""Share of normal test images that lie above the limits at which detectors are compared."""


def check_alone(config: Config, task: Task) -> None:
    """Checks that clients have a detector before they train, if they are to be measured alone.

    Raises:
        UserError: If the task has no detector without training.
    """
    if config["evaluation"]["alone"] and task.trains and not isinstance(task, MemoryBank):
        raise UserError(
            f"evaluation.alone=true: a client alone is measured before it trains, and task {type(task).__name__} has"
            " learned nothing then; leave it out"
        )


def alone(run: Run) -> dict[str, Any]:
    """Measures the detector that each client has without the others, on the test images of all clients.

    For each client a federation of this client alone plays the set-up, and the rounds if they train nothing: that
    builds a memory of the client's own images. Clients that cannot be measured, alone or in the federation, are left
    out if the policy is to leave out clients that fail. Each process measures some of the clients.

    Returns:
        ``metrics``, summarised over clients; ``found``, the result of `found_defects` for the detectors ``alone`` and
        ``together``; and ``at_false_alarms``. Empty if the configuration does not ask for it (``evaluation.alone``),
        there is one client, images come in stages, test images are all normal or all anomalous, or sums are masked or
        noised; also empty on all processes but the first.

    Raises:
        UserError: In every process, if a client fails alone and the policy is to stop.
    """
    config, data = run.config, run.local
    clients = on_first(run.fabric, lambda: list(run.predictions))
    federation = config["federation"]
    if (
        not config["evaluation"]["alone"]
        or len(clients) < 2
        or not isinstance(data.images, ImageSet)
        or len({sample.label for sample in data.images.test}) < 2
        or isinstance(data.module, StreamDataModule)
        or is_protected(config)
    ):
        return {}
    config = {
        **config,
        "evaluation": {**config["evaluation"], "pictures": 0},
        "federation": {**federation, "sampler": federation["sampler"] | _ONE_CLIENT},
    }
    sizes = {number: data.module.sizes[number] for number in clients}
    mine = shard(sizes, run.fabric.world_size)[run.fabric.global_rank]
    answers: dict[int, Scored | UserError] = {}
    with run.display.progress("Each client alone") as progress, TemporaryDirectory() as folder:
        for done, number in enumerate(mine, start=1):
            try:
                answers[number] = _score(run, config, number, Path(folder))
            except UserError as error:
                answers[number] = error
            progress(done, len(mine))
    answers = gather(run.fabric, answers)
    on_first(run.fabric, lambda: _refuse_failed(run, answers))
    scored = {number: answer for number, answer in answers.items() if isinstance(answer, Scored)}
    if not scored:
        return {}
    evaluator = build_evaluator(config, data, run.model.method, run.fabric)
    by_whom = {
        "alone": {number: one.predicted for number, one in scored.items() if one.predicted is not None},
        "together": {number: run.predictions[number] for number in scored},
    }
    images = evaluated_images(config, data)
    return {
        "metrics": evaluator.summarise(scored),
        "found": {
            who: found_defects({client: one.scores for client, one in predicted.items()}, images)
            for who, predicted in by_whom.items()
        },
        "at_false_alarms": FALSE_ALARMS,
    }


def _refuse_failed(run: Run, answers: Mapping[int, Scored | UserError]) -> None:
    """Raises an error if a client failed alone, unless the policy is to leave out clients that fail."""
    for number, answer in answers.items():
        if isinstance(answer, UserError) and not run.federation.sampler.skips:
            advice = "evaluation.alone=false does without"
            raise UserError(f"client {number} alone: {answer}; {advice}") from answer


def found_defects(scores: Mapping[int, Tensor], images: EvaluatedImages) -> dict[str, float]:
    """Computes the share of anomalous images above the limit that a share `FALSE_ALARMS` of normal test images exceeds.

    Limits do not come from calibration but from the test images, so that detectors are compared at equal rates.

    Args:
        scores: Image scores by client [n].
        images: The test images.

    Returns:
        Means over clients. ``all`` is over the images of all products, with one limit. ``own`` is over the products
        that a client holds, each with its own limit, weighted by the number of the client's images of it. Products
        without a normal test image have no limit and are left out; the mean is NaN where no product is left.
    """
    found: dict[str, list[float]] = {"all": [], "own": []}
    for client, client_scores in scores.items():
        limits = {}
        for product in {name for name in images.products if name is not None}:
            limits[product] = _limit(client_scores, images, [name == product for name in images.products])
        common_limit = _limit(client_scores, images, [True] * len(client_scores))
        found["all"].append(1 - Rate.of(images.labels, client_scores > common_limit).miss_rate)
        held = {
            name: n for name, n in images.held[client].items() if math.isfinite(limits.get(name, math.inf))
        }
        rates = judged(rates_of(client_scores, images, limits), held, limits)
        found["own"].append(1 - rates["own"].miss_rate)
    return {name: defined_mean(shares) for name, shares in found.items()}


def _limit(scores: Tensor, images: EvaluatedImages, chosen: Sequence[bool]) -> float:
    """Returns the lowest image score that at most a share `FALSE_ALARMS` of the chosen normal images exceeds."""
    ranked = scores[torch.tensor(chosen) & (images.labels == 0)].double().sort(descending=True).values
    return float(ranked[int(FALSE_ALARMS * len(ranked))]) if len(ranked) else math.inf


def _score(run: Run, config: Config, number: int, folder: Path) -> Scored:
    """Plays a federation of one client, without callbacks and checkpoints, and scores its detector."""
    data, module = run.local, run.local.module
    fabric = of_this_process(run.fabric, config["fabric"]["precision"])
    model = build_model(config, data.images.categories, backbone=run.model.backbone)
    only = [
        list(indices) if client == number else [] for client, indices in enumerate(data.partition.clients)
    ]
    mine = FederatedDataModule(module.train, module.test, only, module.batch_size, module.eval_batch_size)
    evaluator = build_evaluator(config, data, model.method, fabric)
    assert isinstance(evaluator, AnomalyEvaluator)
    federation = build_federation(config, folder, model, mine, evaluator, fabric, data.digest)
    federation.server.register_clients({number: mine.sizes[number]})
    exchanges = federation.exchanges
    trains = any(exchange.trains for exchange in exchanges.of_round(1))
    last = 0 if trains else federation.rounds
    for round in range(exchanges.first_round, last + 1):
        federation.history.append(federation.play(round))
    scored: Scored = federation.ask(last, evaluator, [number])[number]
    return scored
