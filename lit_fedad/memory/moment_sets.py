"""Second moments of several sets of vectors at once: of products, or of the positions of an image."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lit_fedad.contracts.message import Message
from lit_fedad.memory.moments import Moments, check_covariance, symmetric, upper_triangle

_CACHED = 1 << 17
"""Numbers of the matrices that are computed with at once, which stay in the processor's cache: 1 MB."""


@dataclass(frozen=True)
class MomentSets:
    """Moments of n sets of vectors.

    Attributes:
        count: Number of vectors of each set, int64 [n].
        mean: Their means [n, C]; float32 as clients send them, float64 of sums.
        covariance: Upper triangles of their covariances [n, C (C + 1) / 2].
    """

    count: Tensor
    mean: Tensor
    covariance: Tensor

    @classmethod
    def of(cls, sets: Iterable[Moments], channels: int) -> MomentSets:
        """Stacks single sets, of which there may be none."""
        held = list(sets)
        mean = torch.zeros(len(held), channels, dtype=torch.float64)
        covariance = mean.new_zeros(len(held), channels * (channels + 1) // 2)
        for place, part in enumerate(held):
            mean[place], covariance[place] = part.mean, upper_triangle(part.covariance)
        return cls(torch.tensor([part.count for part in held], dtype=torch.int64), mean, covariance)

    @classmethod
    def union(cls, parts: Sequence[MomentSets]) -> MomentSets:
        """Computes the moments of the union of disjoint parts, at least one, set by set; see `Moments.union`."""
        if len(parts) == 1:
            return parts[0]
        count = torch.stack([part.count for part in parts]).sum(0)
        total = count.clamp(min=1).double()[:, None]
        mean = torch.stack([part.count[:, None] * part.mean.double() for part in parts]).sum(0) / total
        covariance = torch.zeros(parts[0].covariance.shape, dtype=torch.float64)
        for at in cached_sets(*mean.shape):
            for part in parts:
                offset = part.mean[at] - mean[at]
                spread = part.covariance[at] + upper_triangle(offset[:, :, None] * offset[:, None])
                covariance[at] += (part.count[at, None] / total[at]) * spread
        return cls(count, mean, covariance)

    @classmethod
    def of_message(cls, message: Mapping[str, Tensor]) -> MomentSets:
        """Takes the sets out of a message that `message` made."""
        count = message["count"].cpu()
        return cls(count, *(_placed(message[name].cpu(), count > 0) for name in ("mean", "covariance")))

    def message(self) -> Message:
        """Returns ``count`` [n] and, in single precision, ``mean`` and ``covariance`` of sets that have a vector."""
        filled = self.count > 0
        rows = {"mean": self.mean, "covariance": self.covariance}
        return {"count": self.count, **{name: _of(entry, filled).float() for name, entry in rows.items()}}

    def __len__(self) -> int:
        return len(self.count)

    def __iter__(self) -> Iterator[Moments]:
        for count, mean, triangle in zip(self.count.tolist(), self.mean, self.covariance, strict=True):
            yield Moments(count, mean.double(), symmetric(triangle.double(), len(mean)))

    def covariances(self, at: slice) -> Tensor:
        """Unpacks the covariances of some sets, float64 [m, C, C]."""
        return symmetric(self.covariance[at], self.mean.shape[1]).double()

    def check(self) -> None:
        """Checks that every covariance can be one; see `check_covariance`."""
        for at in cached_sets(*self.mean.shape):
            check_covariance(self.covariances(at))


def cached_sets(sets: int, channels: int) -> list[slice]:
    """Cuts sets into parts whose matrices [C, C] stay in the processor's cache."""
    step = max(1, _CACHED // channels**2)
    return [slice(start, start + step) for start in range(0, sets, step)]


def _of(rows: Tensor, filled: Tensor) -> Tensor:
    """Returns the rows of filled sets; the tensor itself where all are."""
    return rows if filled.all() else rows[filled]


def _placed(rows: Tensor, filled: Tensor) -> Tensor:
    """Places rows at the filled sets, zeros elsewhere; the tensor itself where all are filled."""
    if filled.all():
        return rows
    placed = rows.new_zeros(len(filled), *rows.shape[1:])
    placed[filled] = rows
    return placed
