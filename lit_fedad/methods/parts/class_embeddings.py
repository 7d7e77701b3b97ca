"""What one labelled image adds to the mean embeddings of classes, and these means of the sum.

An embedding is an image's feature at length 1. Weighted by the image's importance w, at most 1, it stands in the row of
the image's class, and w times a constant beside it. What one image adds is at most half as long as 1, so that the usual
clip of differential privacy leaves it as it is.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from lit_fedad.condensation.selection import importance
from lit_fedad.contracts import Message
from lit_fedad.contracts.batches import map_batches
from lit_fedad.contracts.image_sums import HiddenByNoiseError
from lit_fedad.methods.parts.functional import with_weights
from lit_fedad.tasks.classifier import Classifier

TOTAL, MASS = "total", "mass"

CONSTANT = 0.3
"""The entry beside an embedding. A small one leaves more of the length to the embedding, less to a class's weight."""

LONGEST = 0.5
"""Largest length of what one image adds."""

_ROOT = math.sqrt(1 + CONSTANT**2)


class JudgesImages(Protocol):
    """A client that weights its images by importance.

    Attributes:
        previous: Weights of the model of the round before; empty before.
        alpha: Share of the current model in the mixed logits of `importance`.
        bias: Its bias b.
    """

    previous: Message
    alpha: float
    bias: float

    @property
    def task(self) -> Classifier:
        """The current model."""

    def shared_state(self) -> Message:
        """Returns the current weights."""


class ClassEmbeddings:
    """The sums ``total`` [K, D] and ``mass`` [K] of importance-weighted embeddings, by class.

    Args:
        client: Models; it keeps the current one as the previous one when its images have been summed.
    """

    def __init__(self, client: JudgesImages) -> None:
        self.client, self.task = client, client.task

    def form(self) -> dict[str, tuple[int, ...]]:
        """Declares the sums."""
        return {TOTAL: (self.task.classes, self.task.num_features), MASS: (self.task.classes,)}

    @torch.no_grad()
    def parts(self, loader: Iterable[Any]) -> Iterator[dict[str, Tensor]]:
        """Yields what the images of each batch add, weighted by their `importance`."""
        task, client = self.task, self.client
        previous = {name: entry.to(task.device) for name, entry in client.previous.items()}

        def embedded(batch: Mapping[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
            features, labels = task(batch).float(), batch["label"]
            logits = task.classifier(features)
            before = logits
            if previous:
                before = with_weights(task, previous, lambda _: task.classifier(task(batch).float()))
            weights = importance(logits, before, labels, client.alpha, client.bias)
            return embeddings(features).double().cpu(), weights.double().cpu(), labels.cpu()

        task.eval()
        for vectors, weights, labels in map_batches(task, loader, embedded):
            rows = LONGEST / _ROOT * weights[:, None] * F.one_hot(labels, task.classes).double()
            yield {TOTAL: rows[:, :, None] * vectors[:, None], MASS: CONSTANT * rows}
        client.previous = client.shared_state()

    def joined(self, server: Any, sums: Mapping[str, Tensor], noise: float) -> Message:
        """Returns the sums, with zeros for classes whose mass lies within three deviations of the noise.

        Raises:
            HiddenByNoiseError: If that of all does.
        """
        shown = sums[MASS] > 3 * noise
        if not shown.any():
            raise HiddenByNoiseError
        return {
            TOTAL: torch.where(shown[:, None], sums[TOTAL], 0.0),
            MASS: torch.where(shown, sums[MASS], 0.0),
        }


def embeddings(features: Tensor) -> Tensor:
    """Brings features [n, D] to length 1; those without a length stay zero."""
    return F.normalize(features, dim=1)


def mean_embeddings(sums: Message) -> tuple[Tensor, Tensor]:
    """Computes the mean embeddings of the classes that images have been summed of.

    Args:
        sums: ``total`` [K, D] and ``mass`` [K].

    Returns:
        The k classes, int64 [k], and their importance-weighted mean embeddings, float32 [k, D].
    """
    classes = (sums[MASS] > 0).nonzero()[:, 0]
    total, mass = sums[TOTAL].double()[classes], sums[MASS].double()[classes]
    return classes, (CONSTANT * total / mass[:, None]).float()


def fewest_images(sums: Message) -> float:
    """Computes how many images can have the ``mass`` of some sums: at least as many as if all had importance 1."""
    return float(sums[MASS].double().sum()) * _ROOT / (LONGEST * CONSTANT)


def longest_embedding(sums: Message) -> float:
    """Computes the length of the longest mean embedding: above 1, no images can have such sums."""
    lengths, mass = sums[TOTAL].double().norm(dim=1), sums[MASS].double()
    return float((CONSTANT * lengths / mass.clamp(min=1e-9)).where(lengths > 0, 0.0).max())
