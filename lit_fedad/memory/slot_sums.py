"""Sums of patches by slot: they add up over clients, and images can be taken out of them again."""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lit_fedad.contracts.message import Message
from lit_fedad.memory.merge import root_mean_squares, shared_slots
from lit_fedad.memory.moments import Moments, symmetric
from lit_fedad.memory.reduce import Reduced

SPLIT = 0.1
"""Distance of a split slot from its origin, as a share of the spread of the memory."""


def draw_slots(
    moments: Moments, statistics: Mapping[str, Tensor], slots: int, generator: torch.Generator
) -> Tensor:
    """Draws slots from the Gaussian with the moments of all features, as they are standardised.

    Args:
        moments: Moments of frozen features.
        statistics: What features are standardised by (`statistics_of`); empty for nothing.
        slots: Number of slots.
        generator: Source of the randomness.

    Returns:
        The slots [slots, C].
    """
    channels = len(moments.mean)
    mean, scaled = moments.mean, moments
    if statistics:
        scaled = moments.scaled(statistics["scale"])
        mean = (moments.mean - statistics["mean"].double()) / statistics["scale"].double()
    variances, directions = torch.linalg.eigh(scaled.covariance)
    drawn = torch.randn(slots, channels, generator=generator, dtype=torch.float64)
    rows = mean + (drawn * variances.clamp(min=0).sqrt()) @ directions.T
    if "whitening" in statistics:
        rows = rows @ symmetric(statistics["whitening"].double(), channels)
    return rows.float()


def split_fullest(counts: Tensor, enough: Tensor) -> Tensor:
    """Finds, for every slot that too few images lie behind, a full one to be split, the fullest first.

    Two slots beside each other share the patches of one in the next Lloyd step (Linde, Buzo and Gray 1980).

    Args:
        counts: Number of patches of each slot [slots].
        enough: Whether enough images lie behind it, bool [slots]; not all False.

    Returns:
        The number of the slot that each is, or is split from [slots].

    Example:
        >>> split_fullest(torch.tensor([8.0, 0.0, 3.0, 0.0, 0.0]), torch.tensor([True, False, True, False, False]))
        tensor([0, 0, 2, 0, 2])
    """
    place = torch.arange(len(counts))
    fullest = [(-float(counts[slot]), int(slot)) for slot in enough.nonzero()[:, 0]]
    heapq.heapify(fullest)
    for slot in (~enough).nonzero()[:, 0].tolist():
        count, origin = fullest[0]
        place[slot] = origin
        heapq.heapreplace(fullest, (count / 2, origin))
    return place


def copies_apart(memory: Tensor, generator: torch.Generator) -> Tensor:
    """Moves every slot that is a copy of an earlier one a little aside, in a random direction.

    Args:
        memory: Slots [slots, C].
        generator: A CPU generator; equal ones move copies alike, on the server and at every client.

    Returns:
        The slots [slots, C]; those that are no copies as they are.
    """
    slots = memory.cpu()
    _, kind = slots.unique(dim=0, return_inverse=True)
    earliest = torch.full((len(slots),), len(slots)).scatter_reduce_(
        0, kind, torch.arange(len(slots)), "amin"
    )
    copied = (earliest[kind] != torch.arange(len(slots)))[:, None]
    spread = slots.var(0, correction=0).sqrt()
    moved = slots + SPLIT * spread * torch.randn(slots.shape, generator=generator)
    return torch.where(copied, moved, slots).to(memory)


def carried(sent: Message, past: Message, stage: int) -> tuple[Message, bool]:
    """Finds what a client adds the images of its stage to, and whether it has not added them before.

    Sums are the fields of `Reduced` by name, and ``stages``: how many stages' images they hold. In a stage that comes
    again nothing is new.

    Args:
        sent: The sums that the client sent last; empty before.
        past: The sums that it added the images of that stage to.
        stage: Its stage now, from 0.

    Returns:
        Sums of other stages' images, empty where there are none, and whether the stage's own are to be added.

    Example:
        >>> first, second = ({"stages": torch.tensor(stages)} for stages in (1, 2))
        >>> carried(first, {}, 0), carried(first, {}, 1)  # the first stage goes on; the second begins
        (({}, True), ({'stages': tensor(1)}, True))
        >>> carried(second, first, 0)  # the first comes again
        ({'stages': tensor(2)}, False)
    """
    if stage != int(sent.get("stages", 0)) - 1:
        past = sent
    return past, stage >= int(past.get("stages", 0))


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
        taken = part.counts.double()
        remaining = self.counts.double() - taken
        sums = self.counts[:, None].double() * self.memory - taken[:, None] * part.memory
        remains = (remaining > 0.5)[:, None]  # counts are whole numbers
        return replace(
            self,
            memory=torch.where(remains, sums / remaining[:, None], self.memory.double()).float(),
            counts=remaining.clamp(min=0),
            squares=(self.squares.double() - taken * part.radii.double().square()).clamp(min=0),
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
