"""Ordered bins for scores of any scale: fixed logarithmic bins, or one bin for every distinct score."""

from dataclasses import dataclass

import torch
from torch import Tensor

from lit_fedad.core.errors import UserError

_FLOAT32_MANTISSA_BITS = 23
_FLOAT32_EXPONENT_BIAS = 127
_FLOAT32_MAGNITUDE = 0x7FFFFFFF


def as_scores(scores: Tensor) -> Tensor:
    """Converts scores of any shape and real dtype to float32 [n], the precision in which all metrics compare them.

    Raises:
        UserError: If a score is NaN, which has no rank.
    """
    flat = scores.detach().float().flatten()
    # The maximum propagates NaN and costs a fifth of `isnan().any()`.
    if flat.numel() and flat.amax().isnan():
        raise UserError(
            "anomaly scores hold NaN: the model has diverged; lower the learning rate or check its inputs"
        )
    return flat


@dataclass(frozen=True)
class LogBins:
    """Bins of constant relative width that need no range of the scores in advance.

    The bit pattern of a positive float32 grows with its value and holds exponent and leading mantissa digits
    side by side, so shifting it right is a logarithmic histogram with linear steps inside every octave.
    Negative scores mirror the positive ones. Since the bins do not depend on the data, the counts of
    different batches, processes and clients add up exactly.

    Two scores of one sign share a bin only if they differ by less than 2^-mantissa_bits of the smaller (one
    in 1,024 by default), or if both magnitudes lie below 2^min_exponent (about 2e-10; such scores count as
    zero) or at or above 2^max_exponent (about 2e7). Scores that vary by less than that around a large offset
    need more bits.

    Attributes:
        mantissa_bits: Bins per octave, as a power of two, 0 to 23.
        min_exponent: Magnitudes below 2^min_exponent share the bin of zero; at least -126.
        max_exponent: Magnitudes from 2^max_exponent on share the outermost bin of their sign; at most 128.

    Example:
        >>> bins = LogBins(mantissa_bits=1, min_exponent=0, max_exponent=2)
        >>> bins.count
        11
        >>> bins.index(torch.tensor([-9.0, -1.0, 0.0, 0.5, 1.0, 1.4, 1.5, 2.0, 3.0, 4.0, 9.0]))
        tensor([ 0,  4,  5,  5,  6,  6,  7,  8,  9, 10, 10], dtype=torch.int32)
    """

    mantissa_bits: int = 10
    min_exponent: int = -32
    max_exponent: int = 24

    @property
    def count(self) -> int:
        """Number of bins, in ascending order of score."""
        return 2 * self._zero + 1

    @property
    def _zero(self) -> int:
        return ((self.max_exponent - self.min_exponent) << self.mantissa_bits) + 1

    def index(self, scores: Tensor) -> Tensor:
        """Computes the bin of every score, int32 [n].

        Raises:
            UserError: If a score is NaN.
        """
        bits = as_scores(scores).view(torch.int32)
        below_first = ((self.min_exponent + _FLOAT32_EXPONENT_BIAS) << self.mantissa_bits) - 1
        step = (bits & _FLOAT32_MAGNITUDE) >> (_FLOAT32_MANTISSA_BITS - self.mantissa_bits)
        step.sub_(below_first).clamp_(0, self._zero)
        sign = bits >> 31  # 0 or -1, for which (step ^ sign) - sign is step or -step
        return step.bitwise_xor_(sign).sub_(sign).add_(self._zero)

    def upper(self, index: Tensor) -> Tensor:
        """Computes the largest score of every bin, float32 of the shape of the numbers; infinity for the last bin.

        Example:
            >>> bins = LogBins(mantissa_bits=1, min_exponent=0, max_exponent=2)
            >>> bins.upper(bins.index(torch.tensor([-9.0, -1.4, 1.5, 9.0]))).tolist()
            [-4.0, -1.0, 1.9999998807907104, inf]
        """
        step = index.to(torch.int64) - self._zero
        shift = _FLOAT32_MANTISSA_BITS - self.mantissa_bits
        below_first = ((self.min_exponent + _FLOAT32_EXPONENT_BIAS) << self.mantissa_bits) - 1
        # The last value of a bin is the one before the next bin's first; below zero it is the bin's own first.
        last = ((step.abs() + below_first + (step >= 0).long()) << shift) - (step >= 0).long()
        values = last.to(torch.int32).view(torch.float32)
        values = torch.where(step < 0, -values, values)
        return values.masked_fill(step == self._zero, torch.inf)


DEFAULT_BINS = LogBins()


def distinct_bins(scores: Tensor) -> tuple[Tensor, int]:
    """Assigns a bin to every distinct score: a histogram over these bins loses nothing.

    Returns:
        Bin of every score [n] and the number of bins, in ascending order of score.

    Raises:
        UserError: If a score is NaN.
    """
    values, index = as_scores(scores).unique(return_inverse=True)
    return index, values.numel()
