"""The addition of messages whose entries servers average."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from lit_fedad.contracts import Free, Message, MessageSpec
from lit_fedad.contracts.additive import Crowd, SumSpec


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
