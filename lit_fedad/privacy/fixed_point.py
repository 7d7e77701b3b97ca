"""Fixed-point numbers modulo 2^32 or 2^64, whose sums are exact in any order, so that masks cancel in them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lit_fedad.contracts.sums import SumSpec
from lit_fedad.core.errors import UserError

Words = dict[str, np.ndarray]
"""Tensors of fixed-point numbers by name, uint32 or uint64: the residues of whole multiples of a step."""

HEADROOM = 4
"""Number of bits above a sum's bound: if masks are left in a sum, 15 of 16 elements exceed the bound."""

_ENOUGH_PLACES = 24
"""Number of binary places after the point that suffices: a float32 below 1 has as many."""


@dataclass(frozen=True)
class FixedPoint:
    """The fixed-point format of one tensor of a sum: whole multiples of ``2^-exponent`` modulo ``2^bits``.

    Attributes:
        name: Name of the tensor, for errors.
        bits: Number of bits, 32 or 64.
        exponent: Number of binary places after the point; negative if the step exceeds 1.
        form: The form of the sum.
    """

    name: str
    bits: int
    exponent: int
    form: SumSpec

    @classmethod
    def of(cls, name: str, form: SumSpec) -> FixedPoint:
        """Chooses the number of bits, and the smallest step that leaves room for the bound and for `HEADROOM`.

        Numbers have 32 bits if that suffices for every whole number or, for numbers that need not be exact, leaves
        `_ENOUGH_PLACES` places after the point.

        Raises:
            UserError: If whole numbers are too large for 64 bits.
        """
        places = [bits - 1 - HEADROOM - max(0, math.ceil(math.log2(form.bound))) for bits in (32, 64)]
        enough = 0 if form.whole else math.inf if form.exact else _ENOUGH_PLACES
        bits, exponent = (32, places[0]) if places[0] >= enough else (64, places[1])
        if form.whole and exponent < 0:
            raise UserError(f"'{name}': sums of up to {form.bound:g} have no room in 64 bits")
        return cls(name, bits, 0 if form.whole else exponent, form)

    @property
    def step(self) -> float:
        """The distance between neighbouring numbers."""
        return math.ldexp(1.0, -self.exponent)

    @property
    def dtype(self) -> np.dtype:
        """The type of encoded numbers; little-endian, so that masks are the same on all machines."""
        return np.dtype(f"<u{self.bits // 8}")

    def encode(self, values: Tensor) -> np.ndarray:
        """Rounds values to the nearest multiple of the step.

        Raises:
            UserError: If a value is not finite, or exceeds the bound.
        """
        numbers = values.detach().double().cpu().numpy()
        if numbers.shape != self.form.shape:
            raise ValueError(f"'{self.name}' has shape {numbers.shape}, declared as {self.form.shape}")
        largest = float(np.abs(numbers).max(initial=0.0))
        if not largest <= self.form.bound * (1 + 1e-6):
            raise UserError(
                f"'{self.name}' adds {largest:g} to a sum that has room for {self.form.bound:g} in all"
            )
        # `asarray`, because numpy's functions turn arrays without dimensions into plain numbers.
        whole = np.asarray(np.rint(np.ldexp(numbers, self.exponent))).astype(np.int64)
        return whole.view(np.uint64).astype(self.dtype)

    def decode(self, residues: np.ndarray) -> Tensor:
        """Returns the values of a sum of encoded numbers: float64, or int64 for whole numbers.

        Raises:
            UserError: If a value exceeds the bound.
        """
        # `asarray`, because sums of arrays without dimensions are plain numbers.
        signed = np.asarray(residues).view(np.dtype(f"<i{self.bits // 8}"))
        whole = np.asarray(signed.astype(np.int64))
        values = np.asarray(np.ldexp(whole.astype(np.float64), -self.exponent))
        # Every client may have rounded its summand up.
        tolerance = 0.0 if self.form.whole else self.form.bound * 1e-6 + 2**16 * self.step
        if np.abs(values).max(initial=0.0) > self.form.bound + tolerance:
            raise UserError(
                f"the sum of '{self.name}' is beyond {self.form.bound:g}, which no clients' can be"
            )
        return torch.from_numpy(whole if self.form.whole else values)


def fixed_points(forms: Mapping[str, SumSpec]) -> dict[str, FixedPoint]:
    """Chooses the fixed-point format of every tensor of a sum, in the order of names."""
    return {name: FixedPoint.of(name, forms[name]) for name in sorted(forms)}


def encode(sums: Mapping[str, Tensor], forms: Mapping[str, SumSpec]) -> Words:
    """Rounds summands to fixed point.

    Raises:
        UserError: If a value exceeds its bound.
    """
    return {name: point.encode(sums[name]) for name, point in fixed_points(forms).items()}


def decode(words: Words, forms: Mapping[str, SumSpec]) -> dict[str, Tensor]:
    """Returns the values of sums of encoded tensors.

    Raises:
        UserError: If a sum exceeds its bound.
    """
    return {name: point.decode(words[name]) for name, point in fixed_points(forms).items()}
