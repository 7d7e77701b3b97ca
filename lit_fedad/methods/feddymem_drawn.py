"""FedDyMem by sums alone: the first memory is drawn from the moments of all features, rounds are Lloyd's steps.

No client sends a vector of its own, so that the sums can be masked; under differential privacy they are others, which
noise can be added to (`lit_fedad.methods.parts.noised_bank`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from lit_fedad.contracts import Exchanges, Message, Update
from lit_fedad.core.bounds import above, at_least, within
from lit_fedad.core.errors import UserError
from lit_fedad.memory.merge import Aggregation
from lit_fedad.memory.slot_sums import copies_apart, draw_slots, split_fullest
from lit_fedad.methods.feddymem import FedDyMemClient, FedDyMemServer
from lit_fedad.methods.parts.bank_sums import made_of_sums
from lit_fedad.methods.parts.first_memory import FirstMemory
from lit_fedad.methods.parts.noised_bank import NOISED_BANK, NOISED_STEPS
from lit_fedad.methods.parts.pooled_moments import held_moments
from lit_fedad.tasks.memory_bank import MemoryBank


class FedDyMemDrawnClient(FedDyMemClient):
    """A client that sends moments of its features once, then sums of its patches by slot.

    Rounds are steps of Lloyd's algorithm, in which a full slot is split in the place of one with too few images.

    Args:
        task: Features, bank and subspace, both made of sums.
        min_images: Number of different images, over all clients, that must lie behind every slot of the shared memory
            from round 1 on; under differential privacy, behind every slot with more than three deviations of the noise.
        noised_directions: Number of directions of features that are looked at under differential privacy.
        noised_share: Share of the variance along these that the subspace holds then.

    Raises:
        UserError: If a number is out of range, or the task's bank is not made of sums.
    """

    def __init__(
        self,
        task: MemoryBank,
        min_images: int = 2,
        noised_directions: int = 48,
        noised_share: float = 0.95,
    ) -> None:
        super().__init__(task, send_counts=True, min_images=min_images)
        at_least("method.client", 2, min_images=min_images, noised_directions=noised_directions)
        above("method.client", 0, noised_share=noised_share)
        within("method.client", 0, 1, noised_share=noised_share)
        if not (task.measures and made_of_sums(task)):
            raise UserError("a drawn memory needs a bank and a subspace of sums: give task=memory_bank_sums")
        self.directions, self.noised_share = min(noised_directions, task.num_features), noised_share
        self.frame: Message = {}

    @property
    def exchanges(self) -> Exchanges:
        """Moments, then a step of Lloyd's algorithm a round; under differential privacy the same by noised sums."""
        plain = super().exchanges
        setup = tuple(one for one in plain.setup if not isinstance(one, FirstMemory))
        return replace(plain, setup=setup, noised=Exchanges(NOISED_BANK, NOISED_STEPS))

    def anchors(self, memory: Tensor) -> Tensor:
        """Returns the slots of the shared memory, copies moved apart."""
        return copies_apart(memory, self.context.common.generator("copies"))


class FedDyMemDrawnServer(FedDyMemServer):
    """The server, which draws the first memory, and splits full slots in the place of others.

    Args:
        client: A client, for sizes.
        aggregation: Aggregation of N memories to one.
        collapse: Share of the memory's initial spread below which the server warns of a collapse.

    Attributes:
        moments: Those of all features; under differential privacy what is known of them (`HoldsBank`).
    """

    def __init__(self, client: FedDyMemDrawnClient, aggregation: Aggregation, collapse: float = 0.5) -> None:
        super().__init__(client, aggregation, collapse)
        self.directions, self.held_share = client.directions, client.noised_share

    @property
    def adds_up(self) -> bool:  # type: ignore[override]
        """Whether memories are merged by adding their patches up."""
        return self.aggregation.adds_up

    def learn(self) -> None:
        """Computes statistics and subspace; once, draws the first memory."""
        super().learn()
        if not self.known:
            generator = self.context.generator("memory")
            memory = draw_slots(held_moments(self.moments)[0], self.statistics, self.slots, generator)
            self.known = {"memory": memory, "radii": torch.ones(self.slots)}

    def aggregate(self, updates: Mapping[int, Update]) -> None:
        """Merges memories; full slots have copies in the place of others, which move apart in the next round."""
        super().aggregate(updates)
        enough = self.slots_of["sum_images"] >= self.min_images
        filled = split_fullest(self.slots_of["sum_counts"], enough)
        self.known |= {name: self.known[name][filled] for name in ("memory", "radii")}

    def anchors(self) -> Tensor:
        """Returns the slots that clients have assigned their patches to: those of the memory, copies moved apart."""
        return copies_apart(super().anchors(), self.context.common.generator("copies"))
