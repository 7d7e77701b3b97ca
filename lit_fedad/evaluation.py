"""Scores clients on the test set, and sets thresholds on normal training images."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import numpy as np
import torch
from lightning.fabric import Fabric
from torch import Tensor
from torch.utils.data import DataLoader

from lit_fedad.contracts import Client, Prediction
from lit_fedad.data.datamodule import FederatedDataModule
from lit_fedad.federation.evaluator import Evaluator
from lit_fedad.metrics.anomaly import AnomalyMetrics
from lit_fedad.metrics.classification import ClassificationMetrics
from lit_fedad.metrics.federated import Summary, summarise
from lit_fedad.metrics.semantic import SemanticMetrics


def predict_batch(client: Client, batch: dict[str, Any], fabric: Fabric) -> Prediction:
    """A client's float32 prediction of one batch, without gradients."""
    with torch.inference_mode(), fabric.autocast():
        prediction = client.predict_step(fabric.to_device(batch))
    maps = prediction.anomaly_map
    logits = prediction.logits
    return Prediction(
        prediction.image_score.float(),
        None if maps is None else maps.float(),
        None if logits is None else logits.float(),
        {name: other.float() for name, other in prediction.others.items()},
    )


def image_scores(client: Client, loader: DataLoader, fabric: Fabric) -> Tensor:
    """A client's score of every image that a loader gives [n]."""
    return torch.cat([predict_batch(client, batch, fabric).image_score.cpu() for batch in loader])


class AnomalyEvaluator(Evaluator):
    """Evaluates every client on the union of all test images (FedDyMem, Eq. 4).

    Args:
        loader: Test batches in a fixed order.
        pixel: Whether masks are there; pixel metrics are then measured of tasks that localise.
        fabric: Moves batches and sets precision.
    """

    metrics: tuple[str, ...] = ("i_auroc", "p_auroc", "pro", "aupr")

    def __init__(self, loader: DataLoader, pixel: bool, fabric: Fabric) -> None:
        self.loader, self.pixel, self.fabric = loader, pixel, fabric

    def score(self, client: Client, number: int) -> AnomalyMetrics:
        """Mergeable metric state of one client."""
        metrics = AnomalyMetrics(pixel=False)
        for position, batch in enumerate(self.loader):
            prediction = predict_batch(client, batch, self.fabric)
            maps = prediction.anomaly_map if self.pixel else None
            if position == 0:
                metrics = AnomalyMetrics(pixel=maps is not None)
            pixels = () if maps is None else (maps.cpu(), batch["mask"])
            metrics.update(prediction.image_score.cpu(), batch["label"], *pixels)
        return metrics

    def spread(self, state: AnomalyMetrics, clients: list[int]) -> dict[int, AnomalyMetrics]:
        """The same state for every client."""
        return dict.fromkeys(clients, state)

    def summarise(self, states: dict[int, AnomalyMetrics]) -> dict[str, Summary]:
        """Mean, worst, pooled and per-client values of each metric."""
        return summarise(states)


class AccuracyEvaluator(Evaluator):
    """Evaluates every client's accuracy on the whole test set, and on one with the client's own class frequencies.

    Args:
        loader: Test batches in a fixed order.
        counts: Training images by client and class [clients, classes].
        fabric: Moves batches and sets precision.
    """

    metrics: tuple[str, ...] = ("accuracy", "own_accuracy", "balanced_accuracy", "predicted_classes")

    def __init__(self, loader: DataLoader, counts: np.ndarray, fabric: Fabric) -> None:
        self.loader, self.counts, self.fabric = loader, torch.from_numpy(counts), fabric

    def score(self, client: Client, number: int) -> ClassificationMetrics:
        """Mergeable metric state of one client."""
        metrics = ClassificationMetrics(self.counts.shape[1], self.counts[number])
        for batch in self.loader:
            prediction = predict_batch(client, batch, self.fabric)
            assert prediction.logits is not None
            metrics.update(prediction.logits.cpu(), batch["label"])
        return metrics

    def spread(self, state: ClassificationMetrics, clients: list[int]) -> dict[int, ClassificationMetrics]:
        """The same predictions for every client, each judged by its own class frequencies."""
        states = {}
        for client in clients:
            states[client] = deepcopy(state)
            states[client].class_shares = self.counts[client].double() / self.counts[client].sum()
        return states

    def summarise(self, states: dict[int, ClassificationMetrics]) -> dict[str, Summary]:
        """Mean, worst, pooled and per-client values of each metric."""
        return summarise(states)


class SemanticEvaluator(Evaluator):
    """Evaluates every client against whole sets of anomalous images (FADngs, experiments).

    Args:
        module: Test batches in a fixed order, and training data by client.
        normal_classes: Products below this number are normal.
        anomalies: Names of the anomaly sets, which are the products that follow.
        fabric: Moves batches and sets precision.
        quantile: Share of a client's training images below its label-free threshold.
    """

    metrics: tuple[str, ...] = ("auroc", "aupr", "fe", "me", "fe_train", "me_train")

    def __init__(
        self,
        module: FederatedDataModule,
        normal_classes: int,
        anomalies: tuple[str, ...],
        fabric: Fabric,
        quantile: float,
    ) -> None:
        self.module, self.normal_classes, self.anomalies = module, normal_classes, anomalies
        self.fabric = fabric
        self.thresholds = Thresholds(module, fabric, quantile)
        if len(anomalies) > 1:
            self.metrics = tuple(
                f"{name}{of}" for of in ("", *(f"_{a}" for a in anomalies)) for name in self.metrics
            )

    def score(self, client: Client, number: int) -> dict[int, SemanticMetrics]:
        """Mergeable metric states: of one client, or of all where they predict alike, each at its own threshold."""
        metrics = SemanticMetrics(self.anomalies)
        for batch in self.module.test_dataloader():
            scores = predict_batch(client, batch, self.fabric).image_score.cpu()
            metrics.update(scores, (batch["product"] - self.normal_classes + 1).clamp(min=0))
        holders = [c for c, size in self.module.sizes.items() if size] if client.uniform else [number]
        return {holder: metrics.at_threshold(self.thresholds(client, holder)) for holder in holders}

    def spread(
        self, state: dict[int, SemanticMetrics], clients: list[int]
    ) -> dict[int, dict[int, SemanticMetrics]]:
        """Each client's own state."""
        return {client: {client: state[client]} for client in clients}

    def summarise(self, states: dict[int, dict[int, SemanticMetrics]]) -> dict[str, Summary]:
        """Mean, worst, pooled and per-client values of each metric."""
        return summarise({client: state[client] for client, state in states.items()})


class Thresholds:
    """Asks clients above which score an image is anomalous: a quantile of their own normal training images' scores.

    Args:
        module: Training data by client.
        fabric: Moves batches and sets precision.
        quantile: Share of the training images below the threshold.
    """

    def __init__(self, module: FederatedDataModule, fabric: Fabric, quantile: float) -> None:
        self.module, self.fabric, self.quantile = module, fabric, quantile

    def __call__(self, client: Client, number: int) -> float:
        """The client's threshold."""
        scores = image_scores(
            client, self.module.client_loader(number, torch.Generator(), shuffle=False), self.fabric
        )
        return float(torch.quantile(scores.double(), self.quantile))
