"""Sums of patches by slot: they add up over clients, and images can be taken out of them again."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lit_fedad.memory.merge import root_mean_squares, shared_slots
from lit_fedad.memory.reduce import Reduced


@dataclass(frozen=True)
class SlotSums:
    """The patches of all clients by slot, summed.

    Attributes:
        anchors: Slots that patches were assigned to, the nearest [slots, C].
        memory: Mean patch of each slot [slots, C].
        counts: Number of its patches [slots].
        squares: Sum of the squares of its patches' values [slots].
        images: Number of different images with a patch in it [slots].
    """

    anchors: Tensor
    memory: Tensor
    counts: Tensor
    squares: Tensor
    images: Tensor

    def without(self, part: Reduced) -> SlotSums:
        """Takes images away, whose patches were compressed by `anchors`. Slots that become empty keep their place."""
        left = self.counts.double() - part.counts.double()
        sums = self.counts[:, None].double() * self.memory - part.counts[:, None].double() * part.memory
        remains = (left > 0.5)[:, None]  # counts are whole numbers
        return replace(
            self,
            memory=torch.where(remains, sums / left[:, None].clamp(min=1), self.memory.double()).float(),
            counts=left.clamp(min=0),
            squares=(self.squares.double() - part.counts.double() * part.radii.double().square()).clamp(
                min=0
            ),
            images=(self.images - part.images).clamp(min=0) * remains[:, 0],
        )

    def bank(self, min_images: int) -> tuple[Tensor, Tensor]:
        """Computes the bank [slots, C] and its radii [slots]: root mean squares of values.

        Args:
            min_images: Fewest images behind a slot; the nearest slot with enough takes the place of another.

        Raises:
            UserError: If no slot has enough images.
        """
        place = shared_slots(self.memory, self.images, min_images)
        totals, counts = (
            torch.bincount(place, sums.double(), minlength=len(place)) for sums in (self.squares, self.counts)
        )
        return self.memory[place], root_mean_squares(totals, counts)[place]
