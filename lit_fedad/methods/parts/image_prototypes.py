"""What one labelled image adds to the statistics of classes, and these statistics of their noised sum."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lit_fedad.contracts import Message
from lit_fedad.contracts.batches import map_batches
from lit_fedad.errors import UserError
from lit_fedad.memory.moments import symmetric, upper_triangle
from lit_fedad.methods.parts.image_moments import without_negative

if TYPE_CHECKING:
    from lit_fedad.methods.prototype_statistics import PrototypeStatisticsClient

_ROOT = math.sqrt(
    3
)  # the label, the feature and its products have norm 1 each: together every image has norm 1


class ImagePrototypes:
    """The sums ``count`` [K], ``total`` [K, C] and ``product`` [C (C + 1) / 2], each divided by the root of 3.

    Features have length 1, so that every image has norm 1: a clip of less shortens all alike, which changes nothing.

    Args:
        client: Features and classes; it keeps its own counts of labels.
    """

    def __init__(self, client: PrototypeStatisticsClient) -> None:
        self.client, self.task = client, client.task

    def form(self) -> dict[str, tuple[int, ...]]:
        """Declares the sums."""
        classes, channels = self.task.classes, self.task.num_features
        return {
            "count": (classes,),
            "total": (classes, channels),
            "product": (channels * (channels + 1) // 2,),
        }

    @torch.no_grad()
    def parts(self, loader: Iterable[Any]) -> Iterator[dict[str, Tensor]]:
        """Yields label, feature and products of each image, and counts the client's own labels."""
        client, channels = self.client, self.task.num_features
        rows, columns = torch.triu_indices(channels, channels)
        double = torch.where(rows == columns, 1.0, math.sqrt(2)).double()
        counts = torch.zeros_like(client.own_counts)

        def features(batch: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
            return self.task(batch).double().cpu() / client.length, batch["label"].cpu()

        for vectors, labels in map_batches(self.task, loader, features):
            label = torch.nn.functional.one_hot(labels, self.task.classes).double()
            counts = counts + label.sum(0)
            yield {
                "count": label / _ROOT,
                "total": label[:, :, None] * vectors[:, None] / _ROOT,
                "product": vectors[:, rows] * vectors[:, columns] * double / _ROOT,
            }
        client.own_counts = counts

    def joined(self, server: Any, sums: Mapping[str, Tensor], noise: float) -> Message:
        """Computes ``count`` [1, K], ``mean`` [1, K, C] and ``within`` [1, C (C + 1) / 2] of all images.

        Classes whose count lies within three deviations of the noise are taken for empty.

        Raises:
            UserError: If all do.
        """
        counts = _ROOT * sums["count"]
        shown = counts > max(0.5, 3 * _ROOT * noise) if noise > 0 else counts > 0
        if not shown.any():
            raise UserError(
                f"federation.privacy: noise of {noise:.3g} hides every class; give more images or a larger epsilon"
            )
        counts = torch.where(shown, counts, 0.0)
        mean = torch.where(shown[:, None], _ROOT * sums["total"] / counts.clamp(min=1e-9)[:, None], 0.0)
        images = counts.sum()
        product = symmetric(_ROOT * sums["product"] / images, mean.shape[1]) / math.sqrt(2)
        product += product.diag().diag() * (math.sqrt(2) - 1)
        within = without_negative(product - (mean.T * counts / images) @ mean)
        return {
            "count": counts.round().clamp(min=1).where(shown, 0.0).long()[None],
            "mean": mean.clamp(-1, 1).float()[None],
            "within": upper_triangle(within).clamp(-1, 1).float()[None],
        }
