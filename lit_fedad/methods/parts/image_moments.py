"""What one image adds to noised moments of projected features: its mean, or the mean of products, at length 1.

As in Analyze Gauss (Dwork, Talwar, Thakurta and Zhang, STOC 2014) noise is added to the second moment itself. Every
image counts alike: directions are those of most images, whatever their contrast, and there is no length to choose.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from lit_fedad.contracts import Message
from lit_fedad.contracts.compute import map_batches
from lit_fedad.contracts.sums import HiddenByNoiseError
from lit_fedad.memory.moments import symmetric
from lit_fedad.tasks.patches import PatchTask

CONSTANT = 0.5
"""The entry beside the mean of an image's features, from which its weight follows."""

_SHORTEST = 1e-12


class ProjectedSums(ABC):
    """Sums over images of functions of their features ``(f - c) A``.

    Args:
        task: Features.
        directions: Number of directions k.
        frame: ``centre`` c [C] and ``frame`` A [C, k], as the server has sent them; empty before.
    """

    def __init__(self, task: PatchTask, directions: int, frame: Message) -> None:
        self.task, self.directions, self.frame = task, directions, frame

    @abstractmethod
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Declares the sums."""

    @abstractmethod
    def from_sums(self, server: Any, sums: Mapping[str, Tensor], noise: float) -> Message:
        """Computes what follows from the sums."""

    @abstractmethod
    def _parts(self, projected: Tensor) -> dict[str, Tensor]:
        """Computes what images add, before they are brought to length 1, of projected patches [B, P, k]."""

    @torch.no_grad()
    def per_image(self, loader: Iterable[Any]) -> Iterator[dict[str, Tensor]]:
        """Yields what the images of each batch add, of length 1; an image without any length adds nothing."""
        centre, frame = (self.frame[name].to(self.task.mean) for name in ("centre", "frame"))

        def added(batch: Mapping[str, Any]) -> dict[str, Tensor]:
            parts = self._parts((self.task.embed(batch).float() - centre) @ frame)
            return {name: part.double().cpu() for name, part in parts.items()}

        for parts in map_batches(self.task, loader, added):
            squares = torch.stack([part.flatten(1).square().sum(1) for part in parts.values()]).sum(0)
            lengths = squares.sqrt().clamp(min=_SHORTEST)
            yield {name: part / lengths.reshape(-1, *[1] * (part.ndim - 1)) for name, part in parts.items()}


class ImageMeans(ProjectedSums):
    """The sums ``weight`` [1] and ``mean`` [k]: ``h = (1/2, mean of projected features)`` of images, at length 1."""

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Declares the sums."""
        return {"weight": (1,), "mean": (self.directions,)}

    def _parts(self, projected: Tensor) -> dict[str, Tensor]:
        return {"weight": projected.new_full((len(projected), 1), CONSTANT), "mean": projected.mean(1)}

    def from_sums(self, server: Any, sums: Mapping[str, Tensor], noise: float) -> Message:
        """Computes the ``mean`` [k] of projected features.

        Raises:
            HiddenByNoiseError: If the weight of all images lies within three deviations of the noise.
        """
        weight = float(sums["weight"])
        if weight <= 3 * noise:
            raise HiddenByNoiseError
        return {"mean": CONSTANT * sums["mean"] / weight}


class ImageProducts(ProjectedSums):
    """The sum ``product`` [k (k + 1) / 2]: the mean of ``g g^T`` over an image's patches g, over its Frobenius norm.

    Entries off the diagonal stand for two, and are taken times the root of 2.
    """

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Declares the sum."""
        return {"product": (self.directions * (self.directions + 1) // 2,)}

    def _parts(self, projected: Tensor) -> dict[str, Tensor]:
        rows, columns = torch.triu_indices(self.directions, self.directions, device=projected.device)
        double = torch.where(rows == columns, 1.0, math.sqrt(2)).to(projected)
        square = projected.mT @ projected / projected.shape[1]
        return {"product": square[:, rows, columns] * double}

    def from_sums(self, server: Any, sums: Mapping[str, Tensor], noise: float) -> Message:
        """Computes ``product`` [k, k], without negative variances, and ``noise``, the length of noise alone.

        Raises:
            HiddenByNoiseError: If noise alone would have a variance as large as the largest.
        """
        product = symmetric(sums["product"], self.directions) / math.sqrt(2)
        product += product.diag().diag() * (math.sqrt(2) - 1)
        # Entries off the diagonal have half the variance of those on it: the largest eigenvalue of such noise is
        # 2 sqrt(k / 2) deviations (Wigner).
        spread = noise * math.sqrt(2 * self.directions)
        if not torch.linalg.eigvalsh(product)[-1] > spread:
            raise HiddenByNoiseError
        return {"product": without_negative(product), "noise": torch.tensor(spread, dtype=product.dtype)}


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
