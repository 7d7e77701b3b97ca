"""The addition of messages whose entries servers average, or that are sums already."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from lit_fedad.contracts import Free, Message, MessageSpec
from lit_fedad.contracts.additive import Crowd, SumSpec

_TAIL = 40.0
"""Deviations of the noise that sums have room for."""


@dataclass(frozen=True)
class WeightedMeans:
    """The addition of messages of which every entry is averaged: ``sum_n z_n W_n`` (`weighted_mean`).

    Addends are shares ``n_i W_i / n`` of the mean over all that were asked. Whole numbers, such as BatchNorm's count of
    batches, are averaged and rounded.

    Attributes:
        equal: Whether every client has the same weight, whatever its number of images.
    """

    equal: bool = False

    def form(self, spec: MessageSpec, everyone: Crowd) -> dict[str, SumSpec]:
        """Declares means: they lie within the bounds of what is averaged."""
        return {
            name: SumSpec(
                tuple(_fixed(size, name) for size in form.shape), max(abs(form.low), abs(form.high), 1e-6)
            )
            for name, form in spec.items()
        }

    def addends(self, message: Message, own: Crowd, everyone: Crowd) -> dict[str, Tensor]:
        """Returns the client's share of the mean, float64."""
        share = self._share(own, everyone)
        return {name: share * entry.double() for name, entry in message.items()}

    def joined(
        self, sums: Mapping[str, Tensor], spec: MessageSpec, answered: Crowd, everyone: Crowd
    ) -> Message:
        """Computes the mean over the clients that answered."""
        share = self._share(answered, everyone)
        means = {name: entry / share for name, entry in sums.items()}
        return {
            name: (means[name] if form.dtype.is_floating_point else means[name].round())
            # Rounding to the step must not leave the declared bounds.
            .clamp(form.low, form.high)
            .to(form.dtype)
            for name, form in spec.items()
        }

    def _share(self, some: Crowd, everyone: Crowd) -> float:
        return some.clients / everyone.clients if self.equal else some.images / everyone.images


@dataclass(frozen=True)
class BoundedSums:
    """The addition of messages that are sums over images already, of parts of bounded length, with noise or without.

    Attributes:
        shapes: Sizes by name.
        longest: Largest norm of an image's part.
        noise: Standard deviation of a client's noise.
    """

    shapes: Mapping[str, tuple[int, ...]]
    longest: float
    noise: float = 0.0

    def form(self, spec: MessageSpec, everyone: Crowd) -> dict[str, SumSpec]:
        """Declares sums of parts and noise."""
        bound = everyone.images * self.longest + _TAIL * self.noise * everyone.clients**0.5
        return {name: SumSpec(shape, bound) for name, shape in self.shapes.items()}

    def addends(self, message: Message, own: Crowd, everyone: Crowd) -> dict[str, Tensor]:
        """Returns the message."""
        return message

    def joined(
        self, sums: Mapping[str, Tensor], spec: MessageSpec, answered: Crowd, everyone: Crowd
    ) -> Message:
        """Returns the sums, as precisely as messages are declared."""
        return {name: part.to(spec[name].dtype) for name, part in sums.items()}


def whole_sum(tensor: Tensor) -> Tensor:
    """Returns counts that are kept as floating-point numbers as whole ones.

    Example:
        >>> whole_sum(torch.tensor([2.0, 0.0]))
        tensor([2, 0])
    """
    return tensor.round().to(torch.int64)


def _fixed(size: int | Free, name: str) -> int:
    if isinstance(size, Free):
        raise TypeError(f"'{name}' has a size that each client chooses: its entries cannot be averaged")
    return size
