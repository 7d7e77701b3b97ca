"""What one image adds to the second moments of features, in public units, and moments of their noised sum.

As in Analyze Gauss (Dwork, Talwar, Thakurta and Zhang, STOC 2014) noise is added to the second moment itself. With an
entry r beside each feature g, ``h = (r, g)``, number, sum and products of features are in one matrix ``h h^T``. Its
mean over an image's patches is what the image adds. A shortened image counts less: moments stay those of a set.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lit_fedad.contracts import Message
from lit_fedad.contracts.batches import map_batches
from lit_fedad.contracts.task import channel_scale
from lit_fedad.data.public import synthetic
from lit_fedad.errors import UserError
from lit_fedad.memory.moments import symmetric, upper_triangle
from lit_fedad.tasks.patches import PatchTask

PICTURES = 32
"""Synthetic pictures that show in which range features lie: they have no relation to any image of a client."""

CONSTANT = 0.5
"""r: the entry beside every feature."""

_FRAMES: WeakKeyDictionary[PatchTask, list[tuple[Tensor, Tensor]]] = WeakKeyDictionary()


class ImageMoments:
    """The sums ``weight`` [n], ``mean`` [n, C] and ``product`` [n, C (C + 1) / 2] over images, of n sets of features.

    Their norm is that of the matrices ``h h^T``: entries that stand for two are taken times the root of 2.

    Args:
        task: Features.
    """

    def __init__(self, task: PatchTask) -> None:
        self.task, self.poolings = task, task.moment_poolings

    def form(self) -> dict[str, tuple[int, ...]]:
        """Declares the sums."""
        sets, channels = len(self.poolings), self.task.num_features
        return {
            "weight": (sets,),
            "mean": (sets, channels),
            "product": (sets, channels * (channels + 1) // 2),
        }

    @torch.no_grad()
    def parts(self, loader: DataLoader) -> Iterator[dict[str, Tensor]]:
        """Yields the mean of ``h h^T`` over the patches of each image."""
        frames = public_frames(self.task)
        channels = self.task.num_features
        rows, columns = torch.triu_indices(channels, channels)
        double = torch.where(rows == columns, 1.0, math.sqrt(2)).double()

        def features(batch: Mapping[str, Any]) -> list[Tensor]:
            return [
                (self.task.embed(batch, pooling).float() - centre.to(self.task.mean))
                / scale.to(self.task.mean)
                for pooling, (centre, scale) in zip(self.poolings, frames, strict=True)
            ]

        for sets in map_batches(self.task, loader, features):
            mean = torch.stack([one.mean(1) for one in sets], 1).double().cpu()
            square = torch.stack([one.mT @ one / one.shape[1] for one in sets], 1).double().cpu()
            yield {
                "weight": torch.full(mean.shape[:2], CONSTANT**2, dtype=torch.float64),
                "mean": math.sqrt(2) * CONSTANT * mean,
                "product": square[:, :, rows, columns] * double,
            }

    def joined(self, server: Any, sums: Mapping[str, Tensor], noise: float) -> Message:
        """Computes ``count``, ``mean`` and ``covariance`` of all images' features."""
        found = [
            self._set(number, frame, {name: part[number] for name, part in sums.items()}, noise)
            for number, frame in enumerate(public_frames(self.task))
        ]
        counts, means, covariances = zip(*found, strict=True)
        return {
            "count": torch.tensor(counts),
            "mean": torch.stack(means).float(),
            "covariance": torch.stack([upper_triangle(one) for one in covariances]).float(),
        }

    def _set(
        self, number: int, frame: tuple[Tensor, Tensor], sums: Mapping[str, Tensor], noise: float
    ) -> tuple[int, Tensor, Tensor]:
        weight = float(sums["weight"]) / CONSTANT**2
        if weight <= 3 * noise / CONSTANT**2:
            raise UserError(
                f"federation.privacy: noise of {noise:.3g} hides the images, which weigh {weight:.3g} in all; give more"
                " images, a larger epsilon or a smaller clip"
            )
        centre, scale = (part.double().cpu() for part in frame)
        mean = sums["mean"] / (math.sqrt(2) * CONSTANT * weight)
        product = symmetric(sums["product"] / weight, len(mean)) / math.sqrt(2)
        product += product.diag().diag() * (math.sqrt(2) - 1)
        covariance = without_negative(product - torch.outer(mean, mean))
        count = max(1, round(weight * self.task.vectors_per_image))
        return count, centre + scale * mean, covariance * torch.outer(scale, scale)


def without_negative(covariance: Tensor) -> Tensor:
    """Computes the nearest matrix without a negative variance, which noise may have brought.

    Args:
        covariance: A symmetric matrix [C, C].

    Example:
        >>> without_negative(torch.tensor([[2.0, 0.0], [0.0, -1.0]])).tolist()
        [[2.0, 0.0], [0.0, 0.0]]
    """
    variances, directions = torch.linalg.eigh(covariance)
    return (directions * variances.clamp(min=0)) @ directions.T


def public_frames(task: PatchTask) -> list[tuple[Tensor, Tensor]]:
    """Measures where features lie, on synthetic pictures, for each set of a task's moments.

    Returns:
        For each set the centre [C], and the scale [C] by which features have a mean square length of 1.
    """
    if task not in _FRAMES:
        height, width = task.size
        pictures = synthetic(PICTURES, max(height, width))[:, :, :height, :width].to(task.mean.device)
        mean, std = (
            torch.tensor(values, device=task.mean.device)[:, None, None]
            for values in (task.backbone.mean, task.backbone.std)
        )
        frames = []
        with torch.no_grad():
            for pooling in task.moment_poolings:
                rows = [
                    task.embed({"image": (part.float() / 255 - mean) / std}, pooling)
                    .flatten(0, 1)
                    .double()
                    .cpu()
                    for part in pictures.split(8)
                ]
                features = torch.cat(rows)
                centre, variance = features.mean(0), features.var(0, correction=0)
                scale = channel_scale(variance, 1.0)
                length = (variance / scale.square()).sum().sqrt()
                frames.append((centre.float(), (scale * length).float()))
        _FRAMES[task] = frames
    return _FRAMES[task]
