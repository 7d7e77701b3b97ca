"""Builds the federation of a run and its evaluator from the configuration, wherever its clients are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from lightning.fabric import Fabric
from torch import Tensor

from lit_fedad.contracts import Context, Method
from lit_fedad.contracts.state import state_of
from lit_fedad.core.building import build, targets
from lit_fedad.core.client_names import NUMBERS, ClientNames
from lit_fedad.core.config import Config
from lit_fedad.core.identity import identity
from lit_fedad.core.own_files import code_of
from lit_fedad.data.labelled import LabelledSet
from lit_fedad.data.partition import Partition
from lit_fedad.data.sample import ImageSet
from lit_fedad.data.semantic import SemanticSet
from lit_fedad.data.stream import StreamDataModule, Timetable
from lit_fedad.evaluation.accuracy import AccuracyEvaluator
from lit_fedad.evaluation.accuracy_stream import StreamAccuracyEvaluator
from lit_fedad.evaluation.anomaly import AnomalyEvaluator
from lit_fedad.evaluation.anomaly_stream import AnomalyStreamEvaluator, product_evaluators
from lit_fedad.evaluation.calibration import CalibrationScores, alphas
from lit_fedad.evaluation.predict import Cases, ImageScorer
from lit_fedad.evaluation.semantic import SemanticEvaluator, SemanticTest
from lit_fedad.experiment.build import Model
from lit_fedad.experiment.run_data import Data
from lit_fedad.federation.checkpoint import Checkpoints
from lit_fedad.federation.client_pool import ClientPool
from lit_fedad.federation.client_runner import ClientData
from lit_fedad.federation.evaluator import Evaluator
from lit_fedad.federation.local_transport import LocalTransport
from lit_fedad.federation.loop import Federation
from lit_fedad.federation.transport import Transport
from lit_fedad.privacy.image_privacy import noise_key
from lit_fedad.privacy.protection import promised, protect


def build_federation(
    config: Config,
    folder: Path,
    model: Model,
    data: ClientData,
    evaluator: Evaluator,
    fabric: Fabric,
    images: str | None,
    transport: Callable[[LocalTransport], Transport] | None = None,
    names: ClientNames = NUMBERS,
    key: bytes = b"",
) -> Federation:
    """Builds the federation of server, clients and evaluator.

    `images` is the hash of images and partition, which must equal that of a resumed checkpoint; None where images are
    on other machines. `key` is the secret from which noise is drawn; empty where no rounds follow or this machine
    draws no noise.
    """
    federation = Federation(
        method=model.method,
        data=data,
        evaluator=evaluator,
        fabric=fabric,
        rounds=config["rounds"],
        seed=config["seed"],
        checkpoints=open_checkpoints(folder, config, model, images),
        pool=ClientPool(state_of(model.client), folder / "personal", config["federation"]["pool_bytes"]),
        sampler=build(config["federation"]["sampler"], "federation.sampler"),
        channel=build(config["federation"]["channel"], "federation.channel"),
        evaluate_every=config["evaluation"]["every"],
        robust=build(config["federation"].get("robust"), "federation.robust"),
        transport=transport,
        names=names,
    )
    secure_sum, privacy = (
        build(config["federation"].get(name), f"federation.{name}") for name in ("secure_sum", "privacy")
    )
    return protect(federation, secure_sum, privacy, key)


def shared_key(folder: Path, config: Config, images: str, fabric: Fabric) -> bytes:
    """Returns, in every process, the secret from which a run's noise is drawn; empty where there is no noise."""
    if (privacy := promised(config)) is None:
        return b""
    key: bytes = fabric.broadcast(noise_key(folder, privacy.seed, images) if fabric.is_global_zero else b"")
    return key


def open_checkpoints(folder: Path, config: Config, model: Model, images: str | None = None) -> Checkpoints:
    """Opens a run's checkpoints.

    They can be resumed only with the same configuration, the same backbone weights and, if `images` (the `data_digest`)
    is given, the same images. Where a file of an own package was changed since, a warning says so.
    """
    made_of = f"{identity(config)}-{model.fingerprint[:16]}"
    return Checkpoints(folder / "checkpoints", made_of, images, code_of(map(str, targets(config))))


IN_THE_PLANE = 500
"""Largest number of normal test images, and of anomalies, that are drawn as points of the plane."""


def build_evaluator(
    config: Config, data: Data, method: Method, fabric: Fabric, common: bool = True
) -> Evaluator:
    """Builds the evaluator for this kind of images; `common` says whether clients share the test images."""
    images, partition, module = data.images, data.partition, data.module
    loader, pro_limit = module.test_dataloader(), config["evaluation"]["pro_limit"]
    counts, pictures = partition.counts(images), config["evaluation"]["pictures"]
    if isinstance(module, StreamDataModule) and method.client.task.kind == "classification":
        by_stage, client_test = partition.stage_counts(images), config["evaluation"]["client_test"]
        return StreamAccuracyEvaluator(loader, module, by_stage, method.client, fabric, client_test)
    if isinstance(images, SemanticSet):
        # Scores of the calibration images. Methods that can leave images out again do so only after the last round.
        scores = CalibrationScores(images, partition, module, fabric)
        test = SemanticTest(
            ImageScorer(loader, fabric),
            images.test_labels,
            images.normal_classes,
            scores,
            alphas(config)[0],
            shown_images(images, partition, config["seed"], config["rounds"])
            if pictures and common
            else torch.empty(0, dtype=torch.int64),
        )
        holders = [number for number, size in module.sizes.items() if size]
        return SemanticEvaluator(images.anomalies, test, holders, common)
    if isinstance(images, LabelledSet):
        return AccuracyEvaluator(loader, torch.from_numpy(counts), fabric, common=common)
    assert isinstance(images, ImageSet)
    spro_limit = config["evaluation"]["spro_limit"] if images.has_saturation else None
    cases = Cases([sample.label for sample in images.test], pictures, module.sizes) if pictures else None
    if isinstance(module, StreamDataModule):
        by_stage = partition.stage_counts(images)
        judges = product_evaluators(images, module, by_stage, fabric, pro_limit, spro_limit)
        return AnomalyStreamEvaluator(judges, module.timetable, by_stage, pro_limit, common, cases)
    products = [sample.category for sample in images.test]
    return AnomalyEvaluator(loader, products, images.has_masks, fabric, pro_limit, spro_limit, common, cases)


def shown_images(images: SemanticSet, partition: Partition, seed: int, rounds: int) -> Tensor:
    """Chooses at random the test images to draw as points: first those of classes that clients hold, then anomalies.

    Returns:
        Indices [m], in ascending order within each of the two parts.
    """
    labels = images.test_labels
    counts = torch.from_numpy(partition.counts(images))[:, : images.normal_classes]
    of_clients = torch.isin(labels, counts.sum(0).nonzero()[:, 0])
    draw = Context(seed, rounds).generator("representations")
    kinds = (of_clients, labels >= images.normal_classes)
    return torch.cat([draw_some(kind.nonzero()[:, 0], IN_THE_PLANE, draw) for kind in kinds])


def draw_some(indices: Tensor, number: int, draw: torch.Generator) -> Tensor:
    """Draws at most `number` of the indices, and keeps their order."""
    return indices[torch.randperm(len(indices), generator=draw)[:number].sort().values]


@dataclass(frozen=True)
class TestsElsewhere:
    """What a server knows about the test images that stay at its clients.

    Attributes:
        classes: Whether the task is classification.
        counts: Number of training images by client and product, int64 [clients, products].
        tested: Number of test images by client and product, int64 [clients, products].
        anomalies: Names of the sets of semantic anomalies; empty for other kinds of images.
        timetable: When stages begin; None where all images are there from the start.
        by_stage: For every client the number of training images of its stages, int64 [stages, 1].
    """

    classes: bool
    counts: np.ndarray
    tested: np.ndarray
    anomalies: Sequence[str]
    timetable: Timetable | None
    by_stage: Sequence[np.ndarray]


def build_evaluator_of_answers(config: Config, tests: TestsElsewhere, fabric: Fabric) -> Evaluator:
    """Builds the evaluator for clients that score their own test images and answer with counts."""
    if tests.classes:
        counts, tested = torch.from_numpy(tests.counts), torch.from_numpy(tests.tested)
        return AccuracyEvaluator(None, counts, fabric, tested, common=False)
    if tests.anomalies:
        return SemanticEvaluator(tests.anomalies, common=False)
    pro_limit = config["evaluation"]["pro_limit"]
    if tests.timetable is not None:
        return AnomalyStreamEvaluator({}, tests.timetable, tests.by_stage, pro_limit, common=False)
    return AnomalyEvaluator(None, (), True, fabric, pro_limit, common=False)
