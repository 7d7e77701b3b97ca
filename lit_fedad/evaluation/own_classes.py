"""Accuracy of classifiers on images of their clients' own, which stay where they are: counts of each class cross."""

from __future__ import annotations

import torch
from torch import Tensor

from lit_fedad.contracts import Client, Message, MessageSpec, TensorSpec
from lit_fedad.core.errors import UserError
from lit_fedad.evaluation.accuracy import AccuracyEvaluator, by_predictor
from lit_fedad.evaluation.own_images import MOST_IMAGES, OwnImagesEvaluator
from lit_fedad.federation.question import Question
from lit_fedad.metrics.classification import ClassificationMetrics, constant_accuracies
from lit_fedad.metrics.federated import Summary, summarise

_COUNTS = ("correct", "total", "predicted")


class OwnAccuracy(Question[ClassificationMetrics]):
    """The question how many of a client's own test images of each class are recognised, and how often it is guessed.

    Args:
        classes: Number of classes K.
        judge: Scores the client on its test images; None on the server, which only reads answers.
    """

    name = "scores"

    def __init__(self, classes: int, judge: AccuracyEvaluator | None = None) -> None:
        self.classes, self.judge = classes, judge

    def __call__(self, client: Client, number: int) -> ClassificationMetrics:
        """Scores the client on its own test images."""
        assert self.judge is not None
        return self.judge.score(client, number)

    def pack(self, answer: ClassificationMetrics) -> Message:
        """Returns images, correct ones and predictions of each class, int64 [K] each."""
        return {name: getattr(answer, name) for name in _COUNTS}

    def spec(self) -> MessageSpec:
        """Declares three counts a class."""
        return {
            name: TensorSpec((self.classes,), torch.int64, low=0, high=MOST_IMAGES, counted=True)
            for name in _COUNTS
        }

    def unpack(self, message: Message) -> ClassificationMetrics:
        """Builds the metric state, without the client's own class frequencies.

        Raises:
            UserError: If more images are right than there are, or than were called so.
        """
        metrics = ClassificationMetrics(self.classes)
        for name in _COUNTS:
            setattr(metrics, name, message[name])
        right, there, called = metrics.correct, metrics.total, metrics.predicted
        if (right > torch.minimum(there, called)).any() or int(there.sum()) != int(called.sum()):
            raise UserError(
                "the client counted more images as right than there are, or guessed more than once"
            )
        return metrics


class OwnClassesEvaluator(OwnImagesEvaluator):
    """An evaluator of every client's accuracy on its own test images.

    Args:
        question: The question for metric states.
        counts: Training images by client and class, int64 [clients, K].
        tested: Test images, likewise.
    """

    metrics: tuple[str, ...] = AccuracyEvaluator.metrics

    def __init__(self, question: OwnAccuracy, counts: Tensor, tested: Tensor) -> None:
        super().__init__(question)
        self.counts, self.tested = counts, tested

    def constants(self, round: int) -> dict[str, dict[str, float]]:
        """Computes the accuracies of constant predictions on each client's own test images."""
        present = (self.tested > 0).long()
        weights = {
            "accuracy": self.tested,
            "own_accuracy": self.counts * present,
            "balanced_accuracy": present,
        }
        return by_predictor({name: constant_accuracies(self.counts, own) for name, own in weights.items()})

    def summarise(self, states: dict[int, ClassificationMetrics]) -> dict[str, Summary]:
        """Computes the mean, worst, pooled and per-client values of each metric."""
        for client, state in states.items():
            state.class_shares = self.counts[client].double() / self.counts[client].sum()
        return summarise(states)
