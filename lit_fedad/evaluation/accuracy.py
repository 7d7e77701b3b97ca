"""Accuracy of classifiers."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

import torch
from lightning.fabric import Fabric
from torch import Tensor
from torch.utils.data import DataLoader

from lit_fedad.contracts import Client, Message, MessageSpec, TensorSpec
from lit_fedad.contracts.disclosure import counted
from lit_fedad.core.errors import UserError
from lit_fedad.evaluation.predict import predict_batch
from lit_fedad.evaluation.state_messages import MOST_IMAGES
from lit_fedad.federation.evaluator import Evaluator
from lit_fedad.federation.round_report import RoundReport
from lit_fedad.metrics.classification import CONSTANTS, ClassificationMetrics, constant_accuracies
from lit_fedad.metrics.federated import Summary, summarise

_COUNTS = ("correct", "total", "predicted")


def test_images(loader: DataLoader, classes: int) -> Tensor:
    """Counts the test images of each class, int64 [K]."""
    counts = torch.zeros(classes, dtype=torch.int64)
    for batch in loader:
        counts += batch["label"].cpu().bincount(minlength=classes)
    return counts


def by_predictor(accuracies: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, float]]:
    """Turns accuracies of constant predictions, by metric, into those by predictor, then metric."""
    return {name: {metric: by_name[name] for metric, by_name in accuracies.items()} for name in CONSTANTS}


class AccuracyEvaluator(Evaluator):
    """An evaluator of each client's accuracy on all test images, and at its own class frequencies.

    Over sites every client is scored on its own test images, and only counts of each class cross.

    Args:
        loader: Test batches in a fixed order; None on a server whose clients have test images of their own.
        counts: Training images by client and class, int64 [clients, K].
        fabric: Moves batches and sets precision.
        tested: Test images of each class, int64 [K], or of each client and class, int64 [clients, K]; None to count
            them in the loader.
        common: Whether all clients are scored on the same images.
    """

    metrics: tuple[str, ...] = ("accuracy", "own_accuracy", "balanced_accuracy", "predicted_classes")

    def __init__(
        self,
        loader: DataLoader | None,
        counts: Tensor,
        fabric: Fabric,
        tested: Tensor | None = None,
        common: bool = True,
    ) -> None:
        self.loader, self.counts, self.fabric, self.common = loader, counts, fabric, common
        self._tested = tested

    def score(self, client: Client, number: int) -> ClassificationMetrics:
        """Computes the metric state of one client."""
        assert self.loader is not None
        metrics = ClassificationMetrics(self.counts.shape[1])
        for batch in self.loader:
            prediction = predict_batch(client, batch, self.fabric)
            assert prediction.logits is not None
            metrics.update(prediction.logits.cpu(), batch["label"])
        return metrics

    def predicted(self, answer: ClassificationMetrics) -> None:
        """Returns nothing: no classified image is drawn."""

    discloses = (counted("numbers of test images by class and predicted class"),)

    def pack(self, answer: ClassificationMetrics) -> Message:
        """Returns images, correct ones and predictions of each class, int64 [K] each."""
        return {name: getattr(answer, name) for name in _COUNTS}

    def spec(self) -> MessageSpec:
        """Declares three counts a class."""
        return {
            name: TensorSpec((self.counts.shape[1],), torch.int64, low=0, high=MOST_IMAGES, counted=True)
            for name in _COUNTS
        }

    def unpack(self, message: Message) -> ClassificationMetrics:
        """Builds the metric state.

        Raises:
            UserError: If a class has more correct images than images or than predictions, or if there are not as many
                predictions as images.
        """
        metrics = ClassificationMetrics(self.counts.shape[1])
        for name in _COUNTS:
            setattr(metrics, name, message[name])
        correct, total, predicted = metrics.correct, metrics.total, metrics.predicted
        if (correct > torch.minimum(total, predicted)).any() or int(total.sum()) != int(predicted.sum()):
            raise UserError(
                "the client counted more images as right than there are, or guessed more than once"
            )
        return metrics

    @cached_property
    def tested(self) -> Tensor:
        """Number of test images of each class, int64 [K], or of each client and class [clients, K]."""
        if self._tested is not None:
            return self._tested
        assert self.loader is not None
        return test_images(self.loader, self.counts.shape[1])

    def constants(self, report: RoundReport) -> dict[str, dict[str, float]]:
        """Computes the accuracies of constant predictions, which are the same after every round."""
        present = (self.tested > 0).long()
        weights = {
            "accuracy": self.tested.expand_as(self.counts),
            "own_accuracy": self.counts * present,
            "balanced_accuracy": present.expand_as(self.counts),
        }
        return by_predictor(
            {name: constant_accuracies(self.counts, shares) for name, shares in weights.items()}
        )

    def summarise(self, states: dict[int, ClassificationMetrics]) -> dict[str, Summary]:
        """Computes the mean, worst, pooled and per-client values of each metric, at each client's frequencies."""
        return summarise({client: state.at_shares(self.counts[client]) for client, state in states.items()})
