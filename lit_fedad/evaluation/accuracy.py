"""Accuracy of classifiers."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from functools import cached_property

import numpy as np
import torch
from lightning.fabric import Fabric
from torch import Tensor
from torch.utils.data import DataLoader

from lit_fedad.contracts import Client
from lit_fedad.evaluation.predict import predict_batch
from lit_fedad.federation.evaluator import Evaluator
from lit_fedad.metrics.classification import CONSTANTS, ClassificationMetrics, constant_accuracies
from lit_fedad.metrics.federated import Summary, summarise


def test_images(loader: DataLoader, classes: int) -> Tensor:
    """Counts the test images of each class, int64 [K]."""
    counts = torch.zeros(classes, dtype=torch.int64)
    for batch in loader:
        counts += batch["label"].cpu().bincount(minlength=classes)
    return counts


def by_predictor(accuracies: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, float]]:
    """Turns accuracies of constant predictions, by metric, into those by predictor, then metric."""
    return {name: {metric: found[name] for metric, found in accuracies.items()} for name in CONSTANTS}


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

    @cached_property
    def test_images(self) -> Tensor:
        """Number of test images of each class, int64 [K]."""
        return test_images(self.loader, self.counts.shape[1])

    def constants(self, round: int) -> dict[str, dict[str, float]]:
        """Computes the accuracies of constant predictions, which are the same after every round."""
        present = self.test_images > 0
        weights = {
            "accuracy": self.test_images.expand_as(self.counts),
            "own_accuracy": self.counts * present,
            "balanced_accuracy": present.expand_as(self.counts),
        }
        return by_predictor({name: constant_accuracies(self.counts, own) for name, own in weights.items()})

    def summarise(self, states: dict[int, ClassificationMetrics]) -> dict[str, Summary]:
        """Computes the mean, worst, pooled and per-client values of each metric."""
        return summarise(states)
