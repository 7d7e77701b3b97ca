"""Second moments of feature vectors, of one set or several: sums that add up over batches, clients and stages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lit_fedad.contracts.message import Message
from lit_fedad.core.errors import UserError
from lit_fedad.memory.knn import chunks


@dataclass(frozen=True, eq=False)
class Moments:
    """Number, mean and covariance of a set of vectors.

    Attributes:
        count: Number of vectors n.
        mean: Their mean, float64 [C].
        covariance: Their covariance, divided by n, float64 [C, C].
    """

    count: int
    mean: Tensor
    covariance: Tensor

    @classmethod
    def of(cls, batches: Iterable[Tensor], channels: int) -> Moments:
        """Computes the moments of all rows of batches [n, C], in one pass; zeros without a row."""
        tally = Tally(channels)
        for batch in batches:
            tally.add(batch)
        return tally.moments()

    @classmethod
    def none(cls, channels: int) -> Moments:
        """Returns the moments of no vector."""
        zeros = torch.zeros(channels, channels, dtype=torch.float64)
        return cls(0, zeros[0], zeros)

    @classmethod
    def union(cls, parts: Iterable[Moments]) -> Moments:
        """Computes the moments of the union of disjoint sets, exactly: their order does not matter.

        With shares p_i = n_i / n, mean m = sum_i p_i m_i, covariance sum_i p_i (S_i + (m_i - m) (m_i - m)^T).

        Raises:
            ValueError: If there is no part.
        """
        sets = list(parts)
        if not sets:
            raise ValueError("the union of no moments")
        count = sum(part.count for part in sets)
        if count == 0:
            return sets[0]
        mean = torch.stack([part.count * part.mean for part in sets]).sum(0) / count
        covariance = torch.zeros_like(sets[0].covariance)
        for part in sets:
            offset = part.mean - mean
            covariance += (part.count / count) * (part.covariance + torch.outer(offset, offset))
        return cls(count, mean, covariance)

    def without(self, part: Moments) -> Moments:
        """Computes the moments of the vectors that remain without a part: the inverse of `union`.

        If the part has no vector, it returns these moments themselves.
        """
        if part.count == 0:
            return self
        count = self.count - part.count
        if count <= 0:
            return Moments.none(len(self.mean))
        mean = (self.count * self.mean - part.count * part.mean) / count
        part_offset, rest_offset = part.mean - self.mean, mean - self.mean
        covariance = self.count * self.covariance
        covariance -= part.count * (part.covariance + torch.outer(part_offset, part_offset))
        return Moments(count, mean, covariance / count - torch.outer(rest_offset, rest_offset))

    def scaled(self, scale: Tensor) -> Moments:
        """Returns the moments of the vectors divided by a scale [C]."""
        divisor = scale.double()
        return Moments(self.count, self.mean / divisor, self.covariance / torch.outer(divisor, divisor))

    @property
    def variance(self) -> Tensor:
        """Variance of each channel, float64 [C]."""
        return self.covariance.diagonal().clamp(min=0)


class Tally:
    """Running sums from which the moments of vectors that come in batches are computed.

    Args:
        channels: Channels C of a vector.
    """

    def __init__(self, channels: int) -> None:
        self.channels, self.count = channels, 0

    def add(self, batch: Tensor) -> None:
        """Adds the rows of a batch [n, C]."""
        if not len(batch):
            return
        if self.count == 0:
            # Sums around the first batch's mean keep small variances exact for channels far from zero.
            self.shift = batch.mean(0, dtype=torch.float64).float()
            self.total = torch.zeros(self.channels, dtype=torch.float64, device=batch.device)
            self.square = torch.zeros(self.channels, self.channels, dtype=torch.float64, device=batch.device)
        rows = batch.float() - self.shift
        self.count += len(rows)
        self.total += rows.sum(0, dtype=torch.float64)
        self.square += rows.T @ rows

    def moments(self) -> Moments:
        """Computes number, mean and covariance of all rows so far."""
        if self.count == 0:
            return Moments.none(self.channels)
        offset = self.total / self.count
        covariance = self.square / self.count - torch.outer(offset, offset)
        return Moments(self.count, (self.shift.double() + offset).cpu(), covariance.cpu())


def upper_triangle(matrix: Tensor) -> Tensor:
    """Packs symmetric matrices [..., C, C] as their upper triangles, row by row [..., C (C + 1) / 2]."""
    rows, columns = torch.triu_indices(*matrix.shape[-2:], device=matrix.device)
    return matrix.flatten(-2).index_select(-1, rows * matrix.shape[-1] + columns)


def symmetric(triangle: Tensor, channels: int) -> Tensor:
    """Unpacks `upper_triangle` to the symmetric matrices [..., C, C]."""
    rows, columns = torch.triu_indices(channels, channels, device=triangle.device)
    entries = torch.empty(channels, channels, dtype=torch.int64, device=triangle.device)
    entries[rows, columns] = entries[columns, rows] = torch.arange(len(rows), device=triangle.device)
    return triangle.index_select(-1, entries.flatten()).unflatten(-1, (channels, channels))


_ROUNDING = 1e-4
"""Magnitude up to which a negative variance is taken for rounding, as a share of the largest variance of a channel."""


def check_covariance(covariance: Tensor) -> None:
    """Checks that symmetric matrices can be covariances: no direction has a negative variance, beyond rounding.

    Args:
        covariance: The matrices [..., C, C].

    Raises:
        UserError: If a direction has a negative variance.
    """
    largest = covariance.diagonal(dim1=-2, dim2=-1).amax(-1).clamp(min=torch.finfo(covariance.dtype).tiny)
    shifted = covariance.clone()
    shifted.diagonal(dim1=-2, dim2=-1).add_(_ROUNDING * largest[..., None])
    if torch.linalg.cholesky_ex(shifted).info.any():
        raise UserError("the covariance has a negative variance in some direction")


_CACHED = 1 << 17
"""Number of float64 entries of matrices in a block: 1 MB, which stays in the processor's cache."""


@dataclass(frozen=True)
class MomentSets:
    """Moments of n sets of vectors.

    Attributes:
        count: Number of vectors of each set, int64 [n].
        mean: Their means [n, C]; float32 in clients' messages, float64 if computed from sums.
        covariance: Upper triangles of their covariances [n, C (C + 1) / 2].
    """

    count: Tensor
    mean: Tensor
    covariance: Tensor

    @classmethod
    def of(cls, sets: Iterable[Moments], channels: int) -> MomentSets:
        """Stacks single sets; there may be none."""
        moments = list(sets)
        mean = torch.zeros(len(moments), channels, dtype=torch.float64)
        covariance = mean.new_zeros(len(moments), channels * (channels + 1) // 2)
        for row, part in enumerate(moments):
            mean[row], covariance[row] = part.mean, upper_triangle(part.covariance)
        return cls(torch.tensor([part.count for part in moments], dtype=torch.int64), mean, covariance)

    @classmethod
    def union(cls, parts: Sequence[MomentSets]) -> MomentSets:
        """Computes the moments of the union of disjoint parts, at least one, set by set; see `Moments.union`."""
        if len(parts) == 1:
            return parts[0]
        count = torch.stack([part.count for part in parts]).sum(0)
        total = count.clamp(min=1).double()[:, None]
        mean = torch.stack([part.count[:, None] * part.mean.double() for part in parts]).sum(0) / total
        covariance = torch.zeros(parts[0].covariance.shape, dtype=torch.float64)
        for block in cached_sets(*mean.shape):
            for part in parts:
                offset = part.mean[block] - mean[block]
                spread = part.covariance[block] + upper_triangle(offset[:, :, None] * offset[:, None])
                covariance[block] += (part.count[block, None] / total[block]) * spread
        return cls(count, mean, covariance)

    @classmethod
    def of_message(cls, message: Mapping[str, Tensor]) -> MomentSets:
        """Unpacks the sets from a message of `message`."""
        count = message["count"].cpu()
        return cls(
            count, *(in_filled_sets(message[name].cpu(), count > 0) for name in ("mean", "covariance"))
        )

    def message(self) -> Message:
        """Returns ``count`` [n] and, in single precision, ``mean`` and ``covariance`` of sets that have a vector."""
        filled = self.count > 0
        rows = {"mean": self.mean, "covariance": self.covariance}
        if not filled.all():
            rows = {name: entry[filled] for name, entry in rows.items()}
        return {"count": self.count, **{name: entry.float() for name, entry in rows.items()}}

    def __len__(self) -> int:
        return len(self.count)

    def __iter__(self) -> Iterator[Moments]:
        for count, mean, triangle in zip(self.count.tolist(), self.mean, self.covariance, strict=True):
            yield Moments(count, mean.double(), symmetric(triangle.double(), len(mean)))

    def covariances(self, block: slice) -> Tensor:
        """Unpacks the covariances of a block of m sets, float64 [m, C, C]."""
        return symmetric(self.covariance[block], self.mean.shape[1]).double()

    def check(self) -> None:
        """Checks that no covariance has a negative variance; see `check_covariance`."""
        for block in cached_sets(*self.mean.shape):
            check_covariance(self.covariances(block))


def cached_sets(sets: int, channels: int) -> list[slice]:
    """Divides sets into slices whose matrices [C, C] stay in the processor's cache."""
    return list(chunks(sets, channels**2, _CACHED))


def in_filled_sets(rows: Tensor, filled: Tensor) -> Tensor:
    """Puts rows in the places of filled sets, and zeros in all others; returns the tensor itself if all are filled."""
    if filled.all():
        return rows
    all_rows = rows.new_zeros(len(filled), *rows.shape[1:])
    all_rows[filled] = rows
    return all_rows
