"""Accuracy of classifiers."""

from __future__ import annotations

from copy import deepcopy

import numpy as np
import torch
from lightning.fabric import Fabric
from torch.utils.data import DataLoader

from lit_fedad.contracts import Client
from lit_fedad.evaluation.predict import predict_batch
from lit_fedad.federation.evaluator import Evaluator
from lit_fedad.metrics.classification import ClassificationMetrics
from lit_fedad.metrics.federated import Summary, summarise


class AccuracyEvaluator(Evaluator):
    """An evaluator of clients' accuracy on the whole test set, and on one with the client's class frequencies.

    Args:
        loader: Test batches in a fixed order.
        counts: Training images by client and class [clients, classes].
        fabric: Moves batches and sets precision.
    """

    metrics: tuple[str, ...] = ("accuracy", "own_accuracy", "balanced_accuracy", "predicted_classes")

    def __init__(self, loader: DataLoader, counts: np.ndarray, fabric: Fabric) -> None:
        self.loader, self.counts, self.fabric = loader, torch.from_numpy(counts), fabric

    def score(self, client: Client, number: int) -> ClassificationMetrics:
        """Computes the metric state of one client."""
        metrics = ClassificationMetrics(self.counts.shape[1], self.counts[number])
        for batch in self.loader:
            prediction = predict_batch(client, batch, self.fabric)
            assert prediction.logits is not None
            metrics.update(prediction.logits.cpu(), batch["label"])
        return metrics

    def spread(self, state: ClassificationMetrics, clients: list[int]) -> dict[int, ClassificationMetrics]:
        """Returns the same predictions for every client, each with its own class frequencies."""
        states = {}
        for client in clients:
            states[client] = deepcopy(state)
            states[client].class_shares = self.counts[client].double() / self.counts[client].sum()
        return states

    def summarise(self, states: dict[int, ClassificationMetrics]) -> dict[str, Summary]:
        """Computes the mean, worst, pooled and per-client values of each metric."""
        return summarise(states)
