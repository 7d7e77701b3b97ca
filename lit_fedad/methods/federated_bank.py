"""Federated bank: mean patches by slot and a subspace of all features, from sums over all clients.

Nothing is trained. Clients send moments of their features once, then, in every round, sums of their patches by slot of
the shared bank: steps of Lloyd's algorithm. Image scores are residuals outside the subspace (SubspaceAD, arXiv
2602.23013), maps are distances to the bank. The first slots are k-means of some patches of every client, or drawn from
the moments, so that no client sends a vector of its own and all messages can be masked. Under differential privacy the
sums are others, which noise can be added to (`lit_fedad.methods.parts.noised_bank`).
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
from lit_fedad.methods import feddymem
from lit_fedad.methods.feddymem import FedDyMemClient, FedDyMemServer
from lit_fedad.methods.parts.bank_sums import made_of_sums
from lit_fedad.methods.parts.first_memory import FirstMemory
from lit_fedad.methods.parts.noised_bank import NOISED_BANK, NOISED_STEPS
from lit_fedad.methods.parts.pooled_moments import held_moments
from lit_fedad.tasks.memory_bank import MemoryBank


class FederatedBankClient(FedDyMemClient):
    """A client that sends moments of its features once, then sums of its patches by slot.

    Args:
        task: Features, bank and subspace, both made of sums.
        drawn: Whether the first slots are drawn from the moments. A round then splits a full slot in the place of one
            with too few images.
        oversampling: See `FedDyMemClient`; of no matter where slots are drawn.
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
        drawn: bool = False,
        oversampling: float | None = 1.5,
        min_images: int = 2,
        noised_directions: int = 48,
        noised_share: float = 0.95,
    ) -> None:
        super().__init__(task, send_counts=True, oversampling=oversampling, min_images=min_images)
        at_least("method.client", 2, noised_directions=noised_directions)
        above("method.client", 0, noised_share=noised_share)
        within("method.client", 0, 1, noised_share=noised_share)
        if drawn:
            at_least("method.client", 2, min_images=min_images)
            if not (task.measures and made_of_sums(task)):
                raise UserError(
                    "a drawn memory needs a bank and a subspace of sums: give task=memory_bank_sums"
                )
        self.drawn = drawn
        self.directions, self.noised_share = min(noised_directions, task.num_features), noised_share
        self.frame: Message = {}

    def anchors(self, memory: Tensor) -> Tensor:
        """Returns the slots of the shared memory; of drawn ones, copies moved apart."""
        return copies_apart(memory, self.context.common.generator("copies")) if self.drawn else memory


class FederatedBankServer(FedDyMemServer):
    """The server, which adds sums up to the bank; it draws the first slots, if they are drawn.

    Args:
        client: A client, for sizes.
        aggregation: Aggregation of N memories to one.
        collapse: Share of the memory's initial spread below which the server warns of a collapse.

    Attributes:
        moments: Those of all features; under differential privacy what is known of them (`HoldsBank`).
    """

    def __init__(self, client: FederatedBankClient, aggregation: Aggregation, collapse: float = 0.5) -> None:
        super().__init__(client, aggregation, collapse)
        self.drawn, self.directions, self.held_share = client.drawn, client.directions, client.noised_share

    @property
    def merges_sums(self) -> bool:  # type: ignore[override]
        """Whether memories are merged by adding their patches up."""
        return self.aggregation.adds_up

    def learn(self) -> None:
        """Computes statistics and subspace; once, draws the first memory."""
        super().learn()
        if self.drawn and not self.known:
            generator = self.context.generator("memory")
            memory = draw_slots(held_moments(self.moments)[0], self.statistics, self.slots, generator)
            self.known = {"memory": memory, "radii": torch.ones(self.slots)}

    def aggregate(self, updates: Mapping[int, Update]) -> None:
        """Merges memories; full slots have copies in the place of others, which move apart in the next round."""
        super().aggregate(updates)
        if self.drawn:
            enough = self.slots_of["sum_images"] >= self.min_images
            filled = split_fullest(self.slots_of["sum_counts"], enough)
            self.known |= {name: self.known[name][filled] for name in ("memory", "radii")}

    def anchors(self) -> Tensor:
        """Returns the slots that clients have assigned their patches to; of drawn ones, copies moved apart."""
        slots = super().anchors()
        return copies_apart(slots, self.context.common.generator("copies")) if self.drawn else slots


def exchanges(client: FederatedBankClient) -> Exchanges:
    """Moments and the first memory, then a step of Lloyd's algorithm a round; under noise the same by noised sums."""
    plain = feddymem.exchanges(client)
    if not client.drawn:
        return plain
    setup = tuple(one for one in plain.setup if not isinstance(one, FirstMemory))
    return replace(plain, setup=setup, noised=Exchanges(NOISED_BANK, NOISED_STEPS))
