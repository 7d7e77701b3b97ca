"""Builds the evaluator for each kind of data: the same where the test images are here and where they stay at sites."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from lightning.fabric import Fabric

from lit_fedad.contracts import Method
from lit_fedad.core.config import Config
from lit_fedad.data.labelled import LabelledSet
from lit_fedad.data.sample import ImageSet
from lit_fedad.data.semantic import SemanticSet
from lit_fedad.data.stream import StreamDataModule, Timetable
from lit_fedad.evaluation.accuracy import AccuracyEvaluator
from lit_fedad.evaluation.accuracy_stream import StreamAccuracyEvaluator
from lit_fedad.evaluation.anomaly import AnomalyEvaluator
from lit_fedad.evaluation.anomaly_stream import AnomalyStreamEvaluator, product_evaluators
from lit_fedad.evaluation.semantic import SemanticEvaluator, SemanticTest
from lit_fedad.experiment.build import Data
from lit_fedad.experiment.calibration import alphas, calibration_scores
from lit_fedad.federation.evaluator import Evaluator


def build_evaluator(
    config: Config, data: Data, method: Method, fabric: Fabric, common: bool = True
) -> Evaluator:
    """Builds the evaluator for this kind of data.

    Args:
        config: The configuration.
        data: The images.
        method: The method.
        fabric: Device and processes.
        common: Whether all clients are scored on the test images; otherwise these are one client's own.
    """
    loader, pro_limit = data.module.test_dataloader(), config["evaluation"]["pro_limit"]
    counts, sizes = data.partition.counts(data.images), data.module.sizes
    if isinstance(data.module, StreamDataModule) and method.client.task.kind == "classification":
        by_stage, client_test = data.partition.stage_counts(data.images), config["evaluation"]["client_test"]
        return StreamAccuracyEvaluator(loader, data.module, by_stage, method.client, fabric, client_test)
    has_saturation = isinstance(data.images, ImageSet) and data.images.has_saturation
    spro_limit = config["evaluation"]["spro_limit"] if has_saturation else None
    if isinstance(data.module, StreamDataModule) and isinstance(data.images, ImageSet):
        by_stage = data.partition.stage_counts(data.images)
        judges = product_evaluators(data.images, data.module, by_stage, fabric, pro_limit, spro_limit)
        return AnomalyStreamEvaluator(judges, data.module.timetable, by_stage, pro_limit, common)
    if isinstance(data.images, SemanticSet):
        scores = calibration_scores(config, data.images, data.partition, data.module, fabric, method)
        labels, normal = data.images.test_labels, data.images.normal_classes
        test = SemanticTest(data.scorer, labels, normal, scores, alphas(config)[0])
        holders = [number for number, size in sizes.items() if size]
        return SemanticEvaluator(data.images.anomalies, test, holders, common)
    if isinstance(data.images, LabelledSet):
        return AccuracyEvaluator(loader, torch.from_numpy(counts), fabric, common=common)
    products = [sample.category for sample in data.images.test]
    return AnomalyEvaluator(loader, products, data.images.has_masks, fabric, pro_limit, spro_limit, common)


@dataclass(frozen=True)
class TestsElsewhere:
    """What a server knows of the test images that stay at its clients.

    Attributes:
        classes: Whether labels are learnt.
        counts: Training images by client and product, int64 [clients, products].
        tested: Test images by client and product, likewise.
        anomalies: Names of the sets of semantic anomalies; of none for other images.
        timetable: When stages come; None where all images are there from the start.
        by_stage: For every client the training images of its stages, int64 [stages, 1].
    """

    classes: bool
    counts: np.ndarray
    tested: np.ndarray
    anomalies: Sequence[str]
    timetable: Timetable | None
    by_stage: Sequence[np.ndarray]


def build_evaluator_of_answers(config: Config, tests: TestsElsewhere, fabric: Fabric) -> Evaluator:
    """Builds the evaluator of clients that score test images of their own, and answer with counts.

    Args:
        config: The configuration.
        tests: What is known of the test images.
        fabric: Device and processes.
    """
    if tests.classes:
        counts, tested = torch.from_numpy(tests.counts), torch.from_numpy(tests.tested)
        return AccuracyEvaluator(None, counts, fabric, tested, common=False)
    if tests.anomalies:
        return SemanticEvaluator(tests.anomalies, common=False)
    pro_limit = config["evaluation"]["pro_limit"]
    if tests.timetable is not None:
        return AnomalyStreamEvaluator({}, tests.timetable, tests.by_stage, pro_limit, common=False)
    return AnomalyEvaluator(None, (), True, fabric, pro_limit, common=False)
