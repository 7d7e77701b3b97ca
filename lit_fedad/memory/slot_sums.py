"""Sums of patches by slot: they add up over clients, and images can be subtracted from them again."""

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
    """Draws slots from the Gaussian that has the moments of all standardised features.

    Args:
        moments: Moments of frozen features, before standardisation.
        statistics: The statistics by which features are standardised (`statistics_of`); empty if they are not.
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
    """Finds, for every slot with too few images, a full slot to split, the fullest first.

    Two slots beside each other share the patches of one in the next Lloyd step (Linde, Buzo and Gray 1980). A slot
    that is split counts half of its patches from then on.

    Args:
        counts: Number of patches of each slot [slots].
        enough: Whether each slot has patches of enough images, bool [slots]; not all False.

    Returns:
        For each slot its own number or, with too few images, that of the slot to split [slots].

    Example:
        >>> split_fullest(torch.tensor([8.0, 0.0, 3.0, 0.0, 0.0]), torch.tensor([True, False, True, False, False]))
        tensor([0, 0, 2, 0, 2])
    """
    origins = torch.arange(len(counts))
    fullest = [(-float(counts[slot]), int(slot)) for slot in enough.nonzero()[:, 0]]
    heapq.heapify(fullest)
    for slot in (~enough).nonzero()[:, 0].tolist():
        count, origin = fullest[0]
        origins[slot] = origin
        heapq.heapreplace(fullest, (count / 2, origin))
    return origins


def copies_apart(memory: Tensor, generator: torch.Generator) -> Tensor:
    """Moves every slot that is a copy of an earlier one a little aside, in a random direction.

    Args:
        memory: Slots [slots, C].
        generator: A CPU generator. Server and clients use equal ones, so that copies move to the same places.

    Returns:
        The slots [slots, C]; slots that are no copies stay as they are.
    """
    slots = memory.cpu()
    _, value = slots.unique(dim=0, return_inverse=True)
    earliest = torch.full((len(slots),), len(slots)).scatter_reduce_(
        0, value, torch.arange(len(slots)), "amin"
    )
    copied = (earliest[value] != torch.arange(len(slots)))[:, None]
    spread = slots.var(0, correction=0).sqrt()
    moved = slots + SPLIT * spread * torch.randn(slots.shape, generator=generator)
    return torch.where(copied, moved, slots).to(memory)


def carried(sent: Message, past: Message, stage: int) -> tuple[Message, bool]:
    """Finds the sums to which a client adds the images of its stage, and whether these images are new.

    Sums are the fields of `Reduced` by name, and ``stages``: the number of stages whose images they hold. If an earlier
    stage comes again, its images are in the sums already.

    Args:
        sent: The sums that the client sent last; empty before its first message.
        past: The sums without the stage of that message, to which the client added the images of that stage.
        stage: The current stage of the client, from 0.

    Returns:
        The sums of other stages, empty if there are none, and whether the images of the current stage are to be added.

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
    """Sums by slot over the patches of all clients.

    Attributes:
        anchors: Slots to which patches were assigned, each to the nearest [slots, C].
        memory: Mean patch of each slot [slots, C].
        counts: Number of patches of each slot [slots].
        squares: Sum of the squared values of each slot's patches: distances, or what a `Judge` computes [slots].
        images: Number of different images with a patch in each slot [slots].
    """

    anchors: Tensor
    memory: Tensor
    counts: Tensor
    squares: Tensor
    images: Tensor

    def without(self, part: Reduced, same_values: bool = True) -> SlotSums:
        """Subtracts images whose patches were compressed with `anchors`; slots that become empty keep their vector.

        Args:
            part: The compressed patches.
            same_values: Whether the values in ``part`` are those that its patches added to the sums. Otherwise what
                they added is not known, and each slot keeps its mean square.
        """
        subtracted = part.counts.double()
        remaining = self.counts.double() - subtracted
        mean_squares = (
            part.radii.double().square() if same_values else self.squares / self.counts.clamp(min=1)
        )
        sums = self.counts[:, None].double() * self.memory - subtracted[:, None] * part.memory
        nonempty = (remaining > 0.5)[:, None]  # counts are whole numbers
        return replace(
            self,
            memory=torch.where(nonempty, sums / remaining[:, None], self.memory.double()).float(),
            counts=remaining.clamp(min=0),
            squares=(self.squares.double() - subtracted * mean_squares).clamp(min=0),
            images=(self.images - part.images).clamp(min=0) * nonempty[:, 0],
        )

    def bank(self, min_images: int) -> tuple[Tensor, Tensor]:
        """Computes the bank [slots, C] and its radii [slots]: root mean squares of values.

        Args:
            min_images: Fewest images of a slot; the nearest slot with enough replaces one with too few.

        Raises:
            UserError: If no slot has enough images.
        """
        slots = shared_slots(self.memory, self.images, min_images)
        totals, counts = (
            torch.bincount(slots, sums.double(), minlength=len(slots)) for sums in (self.squares, self.counts)
        )
        return self.memory[slots], root_mean_squares(totals, counts)[slots]
