"""FedDyMem: clients share a small bank of normal patch features instead of weights (arXiv 2502.21012, Alg. 1 to 5).

What holds on real images (ResNet-18, 128 pixels, 3 seeds; README, docs/feddymem.md): sharing the memory beats local
training by far, and comes close to, or passes, a centralised nearest-neighbour bank. What does not: the letter of the
paper (`feddymem_literal`) collapses, because Eq. 14 to 16 average by position what k-means returns without one; and
rounds of training after the first shared memory change little.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lit_fedad.contracts import Client, Message, Payload, Server, TensorSpec, Update
from lit_fedad.contracts.randomness import seeded
from lit_fedad.federation.aggregation import pool_quantile, pool_statistics
from lit_fedad.memory.kmeans import kmeans
from lit_fedad.memory.knn import nearest
from lit_fedad.methods.statistics import channel_statistics, statistics_payload
from lit_fedad.tasks.memory_bank import MemoryBank

SKETCH = 257
"""Quantiles that a client sends of its nearest-slot distances."""


class Aggregation(Protocol):
    """The server's part: N uploaded memories become one of the same size."""

    def __call__(
        self, memories: Tensor, counts: Tensor, previous: Tensor | None, generator: torch.Generator
    ) -> Tensor:
        """Memories [N, slots, C], patches behind each slot [N, slots], the last global memory, to [slots, C]."""


class KMeansAggregation:
    """Clusters all uploaded vectors into a new memory (Alg. 3).

    Args:
        weighted: Counts each vector by the patches behind it; off in the paper.
        continued: Seeds Lloyd's algorithm with the last memory, so that slots keep their meaning; off in the paper,
            where each round begins with fresh seeds.
        max_steps: Lloyd steps.
    """

    def __init__(self, weighted: bool = False, continued: bool = False, max_steps: int = 20) -> None:
        self.weighted, self.continued, self.max_steps = weighted, continued, max_steps

    def __call__(
        self, memories: Tensor, counts: Tensor, previous: Tensor | None, generator: torch.Generator
    ) -> Tensor:
        """See `Aggregation`."""
        return kmeans(
            memories.flatten(0, 1),
            memories.shape[1],
            weights=counts.flatten() if self.weighted else None,
            initial=previous if self.continued else None,
            generator=generator,
            max_steps=self.max_steps,
        ).centroids


class MeanAggregation:
    """Averages the memories slot by slot: the ablation without k-means (Table III)."""

    def __call__(
        self, memories: Tensor, counts: Tensor, previous: Tensor | None, generator: torch.Generator
    ) -> Tensor:
        """See `Aggregation`."""
        return memories.mean(0)


class FedDyMemClient(Client):
    """A client: trains its own head against the shared memory, and uploads its patches compressed to a memory.

    Head and optimiser are personal: they are never averaged (Alg. 5).

    Args:
        task: Features, head, loss and bank.
        local_epochs: E.
        keep_optimizer: Whether AdamW's state lives on between rounds.
        send_counts: Whether the number of patches behind each slot and their radius go up too: two numbers a slot.
        independent_init: Every client draws its own initial head, as the letter of Alg. 4 has it. Features of
            different clients are then not comparable: a stress test, not a useful setting.
    """

    needs = MemoryBank
    task: MemoryBank

    def __init__(
        self,
        task: MemoryBank,
        local_epochs: int = 1,
        keep_optimizer: bool = True,
        send_counts: bool = False,
        independent_init: bool = False,
    ) -> None:
        super().__init__(task, local_epochs, keep_optimizer)
        self.send_counts = send_counts
        self.independent_init = independent_init
        self._born = False

    @property
    def setup_phases(self) -> tuple[str, ...]:
        """The first memory; channel statistics and a pooled threshold only where the task wants them."""
        statistics = ("statistics",) if self.task.standardise else ()
        threshold = ("threshold",) if isinstance(self.task.loss.threshold, str) else ()
        return (*statistics, "memory", *threshold)

    def receive(self, broadcast: Message) -> None:
        """Takes over what the server knows by now: statistics, memory, threshold."""
        task = self.task
        if "mean" in broadcast:
            task.load_statistics(broadcast["mean"], broadcast["scale"])
        if "memory" in broadcast:
            task.load_memory(broadcast["memory"], broadcast.get("radii"))
        if "threshold" in broadcast:
            task.threshold = broadcast["threshold"].to(task.threshold)

    def send(self, loader: DataLoader) -> Message:
        """Channel statistics, a compressed memory, or distance quantiles: what the exchange is for."""
        if self.phase == "statistics":
            return channel_statistics(self.task, loader)
        if self.phase == "threshold":
            quantiles, count = self.task.neighbour_quantiles(loader, SKETCH)
            return {"count": torch.tensor(float(count)), "quantiles": quantiles}
        previous = None if self.phase == "memory" else self.task.memory
        reduced = self.task.reduce_memory(loader, self.context, previous)
        message = {"memory": reduced.memory.float()}
        return {**message, "counts": reduced.counts, "radii": reduced.radii} if self.send_counts else message

    def personal_state(self) -> dict[str, Any]:
        """Head and optimiser."""
        head = self.task.head
        return {
            **super().personal_state(),
            "born": self._born,
            "head": {} if head is None else head.state_dict(),
        }

    def load_personal_state(self, state: Mapping[str, Any]) -> None:
        """Swaps head and optimiser in."""
        super().load_personal_state(state)
        if self.task.head is not None:
            self.task.head.load_state_dict(state["head"])
            if self.independent_init and not state["born"]:
                with seeded(self.context.seed, "head", client=self.context.client):
                    self.task.head.reset_parameters()  # type: ignore[operator]
        self._born = True


class FedDyMemServer(Server):
    """The server: clusters the uploaded memories into the next one (Alg. 3), and watches that it does not collapse.

    Args:
        client: A client, for sizes.
        aggregation: How N memories become one.
        collapse: A warning is given once the memory's spread falls below this share of what it was at first.
    """

    def __init__(self, client: FedDyMemClient, aggregation: Aggregation, collapse: float = 0.5) -> None:
        super().__init__(client.setup_phases)
        task = client.task
        self.slots, self.channels = task.slots, task.channels
        self.counted = client.send_counts
        self.aggregation, self.collapse = aggregation, collapse
        self.known: Message = {}
        self._first_spread: float | None = None
        self._diagnostics: dict[str, float] = {}

    def download_payload(self) -> Payload:
        """What is known by now; memory alone, float32 [slots, C], in the paper."""
        return {name: TensorSpec(tuple(tensor.shape)) for name, tensor in self.known.items()}

    def upload_payload(self) -> Payload:
        """A memory, float32 [slots, C]; statistics and quantiles in the set-up exchanges named so."""
        if self.phase == "statistics":
            return statistics_payload(self.channels)
        if self.phase == "threshold":
            return {"count": TensorSpec(()), "quantiles": TensorSpec((SKETCH,))}
        memory, per_slot = {"memory": TensorSpec((self.slots, self.channels))}, TensorSpec((self.slots,))
        return {**memory, "counts": per_slot, "radii": per_slot} if self.counted else memory

    def broadcast(self, client_id: int) -> Message:
        """The same to every client."""
        return self.known

    def aggregate(self, updates: Mapping[int, Update]) -> None:
        """Pools what the exchange was for."""
        messages = [update.message for update in updates.values()]
        if self.phase == "statistics":
            self.known |= pool_statistics(updates)
        elif self.phase == "threshold":
            counts = [float(m["count"]) for m in messages]
            self.known["threshold"] = torch.tensor(
                pool_quantile([m["quantiles"] for m in messages], counts, 0.5)
            )
        else:
            self._merge(messages)

    def _merge(self, messages: list[Message]) -> None:
        memories = torch.stack([m["memory"] for m in messages])
        counts = (
            torch.stack([m["counts"] for m in messages]) if self.counted else torch.ones(memories.shape[:2])
        )
        previous = self.known.get("memory")
        memory = self.aggregation(
            memories, counts, previous, self.context.generator("aggregate")
        ).contiguous()
        self.known["memory"] = memory
        if self.counted:
            radii = torch.stack([m["radii"] for m in messages])
            self.known["radii"] = merge_radii(memories, counts, radii, memory)
        spread = float(memory.var(0, correction=0).sum().sqrt())
        self._first_spread = self._first_spread or spread
        self._diagnostics = {"memory_spread": spread, "client_agreement": agreement(memories, memory)}

    def observe(self, update: Update, client: Client) -> None:
        """The uploaded bank, behind the head that clients begin with: their own never leaves them."""
        assert isinstance(client, FedDyMemClient)
        client.task.load_memory(update.message["memory"], update.message.get("radii"))

    def diagnostics(self) -> dict[str, float]:
        """Memory spread (root of the summed slot variance) and cross-client agreement."""
        return dict(self._diagnostics)

    def warnings(self) -> list[str]:
        """One line once the memory has collapsed."""
        spread = self._diagnostics.get("memory_spread")
        if spread is None or self._first_spread is None or spread >= self.collapse * self._first_spread:
            return []
        share = spread / self._first_spread
        return [
            f"round {self.context.round}: the memory is collapsing: its spread is {share:.0%} of what it was at first"
        ]

    def state_dict(self) -> dict[str, Any]:
        """What is known, and the first spread."""
        return {"known": self.known, "first_spread": self._first_spread, "diagnostics": self._diagnostics}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores `state_dict`."""
        self.known, self._first_spread = dict(state["known"]), state["first_spread"]
        self._diagnostics = dict(state["diagnostics"])


def merge_radii(memories: Tensor, counts: Tensor, radii: Tensor, merged: Tensor) -> Tensor:
    """Root mean square distance of all clients' patches to their merged slot.

    Uploaded vectors are means of their patches: the mean square distance to a merged slot is that to the vector plus
    that from the vector to the slot.

    Args:
        memories: Uploads [N, slots, C].
        counts: Patches behind each vector [N, slots].
        radii: Root mean square distance of those patches to their vector [N, slots].
        merged: The merged memory [slots, C].

    Returns:
        Radii [slots]; slots without a patch get the root mean square of the others.
    """
    offsets, at = nearest(memories.flatten(0, 1), merged, 1)
    squares = radii.flatten().double().square() + offsets[:, 0].double().square()
    weights = counts.flatten().double()
    mass = torch.bincount(at[:, 0], weights, minlength=len(merged))
    total = torch.bincount(at[:, 0], weights * squares, minlength=len(merged))
    typical = total.sum() / mass.sum()
    return torch.where(mass > 0, total / mass.clamp(min=1e-12), typical).sqrt().float()


def agreement(memories: Tensor, merged: Tensor) -> float:
    """How far clients mean the same by the same slot: 1 if every upload lies in the merged memory, 0 if unrelated.

    The mean cosine between uploaded vectors and their nearest merged slots, both taken from the merged memory's mean.

    Args:
        memories: Uploads [N, slots, C].
        merged: The merged memory [slots, C].
    """
    vectors, centre = memories.flatten(0, 1), merged.mean(0)
    _, at = nearest(vectors, merged, 1)
    return float(torch.cosine_similarity(vectors - centre, merged[at[:, 0]] - centre, dim=1).mean())
