"""What each client reaches alone: the same method's detector of one client, as if it had no others."""

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

_ONE = {"min_clients": 1, "fraction": 1.0}
FALSE_ALARMS = 0.05
"""Share of normal test images above the limits by which detectors are compared."""


def check_alone(config: Config, task: Task) -> None:
    """Checks that a client has a detector before it trains, where it is measured alone.

    Raises:
        UserError: If the task learns by training alone.
    """
    if config["evaluation"]["alone"] and task.trains and not isinstance(task, MemoryBank):
        raise UserError(
            f"evaluation.alone=true: a client alone is measured before it trains, and task {type(task).__name__} has"
            " learned nothing then; leave it out"
        )


def alone(run: Run) -> dict[str, Any]:
    """Measures the detector that each client has without the others, on the test images of all.

    The client's set-up is played anew, and its rounds where they train nothing: a memory of its own images. Clients
    that cannot be measured, alone or together, are left out where those that fail are. Each process measures some.

    Returns:
        ``metrics`` with their values over clients, and ``found`` (`found_defects`), ``alone`` and ``together``. Empty
        where the configuration asks for none (``evaluation.alone``), there is one client, images come in stages, no
        test image is anomalous or none normal, or sums are masked or noised, and on all processes but the first.

    Raises:
        UserError: If a client fails alone, and the policy is to stop; in every process.
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
        "federation": {**federation, "sampler": federation["sampler"] | _ONE},
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
    scored = {number: own for number, own in answers.items() if isinstance(own, Scored)}
    if not scored:
        return {}
    evaluator = build_evaluator(config, data, run.model.method, run.fabric)
    by_whom = {
        "alone": {number: own.predicted for number, own in scored.items() if own.predicted is not None},
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
    """Ends the run if a client failed alone, unless clients that fail are left out."""
    for number, answer in answers.items():
        if isinstance(answer, UserError) and not run.federation.sampler.skips:
            advice = "evaluation.alone=false does without"
            raise UserError(f"client {number} alone: {answer}; {advice}") from answer


def found_defects(scores: Mapping[int, Tensor], images: EvaluatedImages) -> dict[str, float]:
    """Computes which share of anomalous images lies above the limit that `FALSE_ALARMS` of normal test images exceed.

    No calibration has a part in it: limits are those of the test images, so that detectors compare at equal rates.

    Args:
        scores: Image scores by client [n].
        images: The test images.

    Returns:
        Means over clients: ``all``, of all products at one limit; ``own``, of the products that a client holds, each
        at a limit of its own and as often as the client holds it. Without a normal test image there is no limit: such
        products are left out, and the mean is NaN where none is left.
    """
    found: dict[str, list[float]] = {"all": [], "own": []}
    for client, own in scores.items():
        limits = {}
        for product in {name for name in images.products if name is not None}:
            limits[product] = _limit(own, images, [name == product for name in images.products])
        everything = _limit(own, images, [True] * len(own))
        found["all"].append(1 - Rate.of(images.labels, own > everything).miss_rate)
        held = {
            name: n for name, n in images.held[client].items() if math.isfinite(limits.get(name, math.inf))
        }
        rates = judged(rates_of(own, images, limits), held, limits)
        found["own"].append(1 - rates["own"].miss_rate)
    return {name: defined_mean(shares) for name, shares in found.items()}


def _limit(scores: Tensor, images: EvaluatedImages, chosen: Sequence[bool]) -> float:
    """Returns the score that at most a share `FALSE_ALARMS` of the chosen normal images lies above."""
    ranked = scores[torch.tensor(chosen) & (images.labels == 0)].double().sort(descending=True).values
    return float(ranked[int(FALSE_ALARMS * len(ranked))]) if len(ranked) else math.inf


def _score(run: Run, config: Config, number: int, folder: Path) -> Scored:
    """Plays a federation of one client, without callbacks and checkpoints, and scores its detector."""
    data, module = run.local, run.local.module
    fabric = of_this_process(run.fabric, config["fabric"]["precision"])
    model = build_model(config, data.images.categories, backbone=run.model.backbone)
    only = [list(own) if client == number else [] for client, own in enumerate(data.partition.clients)]
    mine = FederatedDataModule(module.train, module.test, only, module.batch_size, module.eval_batch_size)
    evaluator = build_evaluator(config, data, model.method, fabric)
    assert isinstance(evaluator, AnomalyEvaluator)
    federation = build_federation(config, folder, model, mine, evaluator, fabric, data.digest)
    federation.server.register_clients({number: mine.sizes[number]})
    steps = federation.exchanges
    trains = any(exchange.trains for exchange in steps.of_round(1))
    last = 0 if trains else federation.rounds
    for round in range(steps.first_round, last + 1):
        federation.history.append(federation.play(round))
    scored: Scored = federation.ask(last, evaluator, [number])[number]
    return scored
