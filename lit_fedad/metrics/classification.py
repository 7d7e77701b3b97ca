"""Accuracy of classification from counts of each class."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from lit_fedad.metrics.base import MergeableMetric, check_logits

CONSTANTS = ("client_largest", "global_largest", "random")
"""Constant predictors: the client's largest class; the largest class of all clients; a random class of the client's."""


def constant_accuracies(counts: Tensor, weights: Tensor) -> dict[str, float]:
    """Computes the expected accuracy of each of `CONSTANTS`, as a mean over clients.

    Args:
        counts: Training images of each client and class [N, K]. A client without any is left out.
        weights: Weight of each class in the test data of each client [N, K], of any sum. A client whose
            weights are all zero is left out.

    Returns:
        Accuracies by name; NaN where no client is left.

    Example:
        >>> constant_accuracies(torch.tensor([[6, 2], [0, 3]]), torch.tensor([[3, 1], [0, 1]]))
        {'client_largest': 0.875, 'global_largest': 0.375, 'random': 0.75}
    """
    chosen = (counts.sum(1) > 0) & (weights.sum(1) > 0)
    largest = counts.sum(0).argmax()  # over all clients, also those left out below
    counts, shares = counts[chosen].double(), weights[chosen].double()
    shares = shares / shares.sum(1, keepdim=True)
    present = (counts > 0).double()
    chances = {
        "client_largest": _one_hot(counts.argmax(1), counts),
        "global_largest": _one_hot(largest, counts),
        "random": present / present.sum(1, keepdim=True),
    }
    return {name: float((chance * shares).sum(1).mean()) for name, chance in chances.items()}


def _one_hot(classes: Tensor, counts: Tensor) -> Tensor:
    return torch.nn.functional.one_hot(classes, counts.shape[1]).double().expand_as(counts)


class ClassificationMetrics(MergeableMetric):
    """Top-1 accuracy: micro, class by class, and with classes as frequent as in a client's training data.

    The state is three counts a class (images, correct ones, predictions), whatever the size of the test set.

    Args:
        classes: Number of classes K.

    Attributes:
        class_shares: Share of each class in the client's training data, float64 [K] (`at_shares`); None for the
            frequencies in the test set. It is no state: `reset` leaves it, and metrics of different shares may be
            merged, to one without.

    Example:
        >>> metrics = ClassificationMetrics(2)
        >>> metrics.update(torch.eye(2)[[0, 0, 0, 0]], torch.tensor([0, 0, 1, 1]))
        >>> {name: float(value) for name, value in metrics.at_shares(torch.tensor([9, 1])).compute().items()}
        {'accuracy': 0.5, 'balanced_accuracy': 0.5, 'own_accuracy': 0.9, 'predicted_classes': 1.0}
    """

    correct: Tensor
    total: Tensor
    predicted: Tensor

    def __init__(self, classes: int) -> None:
        super().__init__(classes)
        self.classes = classes
        self.class_shares: Tensor | None = None
        for name in ("correct", "total", "predicted"):
            self.add_state(name, default=torch.zeros(classes, dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, logits: Tensor, labels: Tensor) -> None:
        """Adds a batch.

        Args:
            logits: Class logits [B, K].
            labels: Classes, int64 [B].

        Raises:
            ValueError: If shapes differ, or a label is not in 0 .. K - 1.
            UserError: If a logit is NaN.
        """
        check_logits(logits, labels, self.classes)
        guesses = logits.argmax(dim=1)
        self.correct = self.correct + self._counts(labels[guesses == labels])
        self.total = self.total + self._counts(labels)
        self.predicted = self.predicted + self._counts(guesses)

    def at_shares(self, counts: Tensor) -> ClassificationMetrics:
        """Copies the metric with classes as frequent as in a client's training data, of ``counts`` or shares [K]."""
        other = deepcopy(self)
        other.class_shares = counts.double() / counts.sum()
        return other

    def merge_state(self, incoming_state: dict[str, Any] | Metric) -> None:
        """Adds the state of another metric, see `MergeableMetric`; ``class_shares`` that differ become None."""
        super().merge_state(incoming_state)
        incoming = getattr(incoming_state, "class_shares", None)
        if self.class_shares is None or incoming is None or not torch.equal(self.class_shares, incoming):
            self.class_shares = None

    def compute_local(self) -> dict[str, Tensor]:
        """Computes accuracies and the number of predicted classes.

        - ``accuracy``: share of correct images.
        - ``balanced_accuracy``: mean over the classes present of the share of correct images.
        - ``own_accuracy``: the same mean with each class weighted by ``class_shares``; without those, ``accuracy``.
        - ``predicted_classes``: number of classes that are predicted at all; 1 is a constant prediction.

        Returns:
            Values by name, float64 scalars. A value is NaN where it is undefined: without an image, or without an image
            of any class of the client.
        """
        present = self.total > 0
        recall = self.correct[present].double() / self.total[present]
        frequency = self.total if self.class_shares is None else self.class_shares.to(self.device)
        weights = frequency[present].double()
        distinct = (self.predicted > 0).sum().double()
        return {
            "accuracy": self.correct.sum().double() / self.total.sum(),
            "balanced_accuracy": recall.mean(),
            "own_accuracy": (recall * weights).sum() / weights.sum(),
            "predicted_classes": torch.where(present.any(), distinct, torch.nan),
        }

    def _counts(self, labels: Tensor) -> Tensor:
        return labels.bincount(minlength=self.classes).to(self.device)
