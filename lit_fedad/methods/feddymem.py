"""FedDyMem: clients share a small bank of normal patch features instead of weights (arXiv 2502.21012, Alg. 1 to 5).

What holds on real images (ResNet-18, 128 pixels, 3 seeds; README, docs/feddymem.md): sharing the memory beats local
training by far, and comes close to, or passes, a centralised nearest-neighbour bank. What does not: the letter of the
paper (`feddymem_literal`) collapses, because FedDyMem Eq. 14, FedDyMem Eq. 15 and FedDyMem Eq. 16 average by position
what k-means returns without one; and
rounds of training after the first shared memory change little.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lit_fedad.contracts import (
    AttackableServer,
    Client,
    Exchange,
    Exchanges,
    Message,
    MessageSpec,
    TensorSpec,
    Update,
)
from lit_fedad.contracts.randomness import seeded
from lit_fedad.federation.aggregation import pool_quantile
from lit_fedad.federation.local_training import Train
from lit_fedad.memory.kmeans import kmeans
from lit_fedad.memory.knn import nearest
from lit_fedad.methods.parts.pooled_statistics import PooledStatistics, load_statistics, statistics_spec
from lit_fedad.tasks.memory_bank import QUANTILES, MemoryBank


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
    kept = ("head", "drew_head")
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
        self.drew_head = False

    @property
    def exchanges(self) -> Exchanges:
        """The first memory, with channel statistics and a pooled threshold where the task needs them; then training."""
        statistics = (PooledStatistics(),) if self.task.standardise else ()
        threshold = (PooledThreshold(),) if isinstance(self.task.loss.threshold, str) else ()
        return Exchanges((*statistics, FirstMemory(), *threshold), (Train(),))

    @property
    def head(self) -> dict[str, Tensor]:
        """The personal head's weights; none where the task has no head."""
        return {} if self.task.head is None else self.task.head.state_dict()

    @head.setter
    def head(self, weights: Mapping[str, Tensor]) -> None:
        if self.task.head is not None:
            self.task.head.load_state_dict(weights)

    def load_personal_state(self, state: Mapping[str, Any]) -> None:
        """Loads another client's head and optimiser; a new client may draw its own head."""
        super().load_personal_state(state)
        if self.independent_init and not self.drew_head and self.task.head is not None:
            with seeded(self.context.seed, "head", client=self.context.client):
                self.task.head.reset_parameters()  # type: ignore[operator]
        self.drew_head = True

    def receive(self, message: Message) -> None:
        """Takes over what the server knows by now: statistics, memory, threshold."""
        task = self.task
        load_statistics(task, message)
        if "memory" in message:
            task.load_memory(message["memory"], message.get("radii"))
        if "threshold" in message:
            task.threshold = message["threshold"].to(task.threshold)

    def broadcast_spec(self) -> MessageSpec:
        """Declares statistics, memory and threshold; in the paper memory alone, float32 [slots, C]."""
        threshold = {"threshold": TensorSpec(())} if isinstance(self.task.loss.threshold, str) else {}
        return {**statistics_spec(self.task), **self.memory_spec("radii"), **threshold}

    def send(self, loader: DataLoader) -> Message:
        """Returns the client's patches compressed to a memory, moved on from the shared one."""
        return self.compressed(loader, self.task.memory)

    def upload_spec(self) -> MessageSpec:
        """Declares a memory, float32 [slots, C]."""
        return self.memory_spec("counts", "radii")

    def compressed(self, loader: DataLoader, previous: Tensor | None) -> Message:
        """Compresses the client's patches to a memory.

        Args:
            loader: Its batches in a fixed order.
            previous: The shared memory [slots, C]; None for the first.
        """
        reduced = self.task.reduce_memory(loader, self.context, previous)
        message = {"memory": reduced.memory.float()}
        return {**message, "counts": reduced.counts, "radii": reduced.radii} if self.send_counts else message

    def memory_spec(self, *per_slot: str) -> MessageSpec:
        """Declares a memory with numbers of each slot, where they are sent."""
        own = dict.fromkeys(per_slot, TensorSpec((self.task.slots,))) if self.send_counts else {}
        return {"memory": TensorSpec((self.task.slots, self.task.num_features)), **own}


class FedDyMemServer(AttackableServer):
    """The server: clusters the uploaded memories into the next one (Alg. 3), and watches that it does not collapse.

    Args:
        client: A client, for sizes.
        aggregation: How N memories become one.
        collapse: A warning is given once the memory's spread falls below this share of what it was at first.
    """

    kept = ("statistics", "known", "first_spread", "latest")

    def __init__(self, client: FedDyMemClient, aggregation: Aggregation, collapse: float = 0.5) -> None:
        super().__init__()
        self.counted = client.send_counts
        self.aggregation, self.collapse = aggregation, collapse
        self.statistics: Message = {}
        self.known: Message = {}
        self.first_spread: float | None = None
        self.latest: dict[str, float] = {}

    def broadcast(self, client_id: int) -> Message:
        """Returns what is known by now, the same to every client."""
        return {**self.statistics, **self.known}

    def aggregate(self, updates: Mapping[int, Update]) -> None:
        """Merges the uploaded memories."""
        messages = [update.message for update in updates.values()]
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
        self.first_spread = self.first_spread or spread
        self.latest = {"memory_spread": spread, "client_agreement": agreement(memories, memory)}

    def adversary_view(self, update: Update, client: Client) -> None:
        """Loads the uploaded bank, behind the head that clients begin with: their own never leaves them."""
        assert isinstance(client, FedDyMemClient)
        client.task.load_memory(update.message["memory"], update.message.get("radii"))

    def diagnostics(self) -> dict[str, float]:
        """Memory spread (root of the summed slot variance) and cross-client agreement."""
        return dict(self.latest)

    def warnings(self) -> list[str]:
        """One line once the memory has collapsed."""
        spread = self.latest.get("memory_spread")
        if spread is None or self.first_spread is None or spread >= self.collapse * self.first_spread:
            return []
        share = spread / self.first_spread
        return [
            f"round {self.context.round}: the memory is collapsing: its spread is {share:.0%} of what it was at first"
        ]


class FirstMemory(Exchange[FedDyMemClient, FedDyMemServer]):
    """Before round 1, clients send memories of untrained features, from which the first shared one is made."""

    name = "memory"

    def broadcast(self, server: FedDyMemServer, client_id: int) -> Message:
        """Returns pooled statistics, or nothing."""
        return server.broadcast(client_id)

    def broadcast_spec(self, client: FedDyMemClient) -> MessageSpec:
        """Declares pooled statistics."""
        return statistics_spec(client.task)

    def receive(self, client: FedDyMemClient, message: Message) -> None:
        """Hands the statistics to the client."""
        client.receive(message)

    def send(self, client: FedDyMemClient, loader: DataLoader) -> Message:
        """Returns a first memory."""
        return client.compressed(loader, previous=None)

    def upload_spec(self, client: FedDyMemClient) -> MessageSpec:
        """Declares a memory."""
        return client.upload_spec()

    def aggregate(self, server: FedDyMemServer, updates: Mapping[int, Update]) -> None:
        """Merges the memories."""
        server.aggregate(updates)


class PooledThreshold(Exchange[FedDyMemClient, FedDyMemServer]):
    """Before round 1, clients send quantiles of their distances to the first memory; th is the pooled median."""

    name = "threshold"

    def broadcast(self, server: FedDyMemServer, client_id: int) -> Message:
        """Returns statistics and the first memory."""
        return server.broadcast(client_id)

    def broadcast_spec(self, client: FedDyMemClient) -> MessageSpec:
        """Declares statistics and memory."""
        return {**statistics_spec(client.task), **client.memory_spec("radii")}

    def receive(self, client: FedDyMemClient, message: Message) -> None:
        """Hands them to the client."""
        client.receive(message)

    def send(self, client: FedDyMemClient, loader: DataLoader) -> Message:
        """Returns how many distances there are, and their quantiles."""
        quantiles, count = client.task.neighbour_quantiles(loader)
        return {"count": torch.tensor(float(count)), "quantiles": quantiles}

    def upload_spec(self, client: FedDyMemClient) -> MessageSpec:
        """Declares `send`."""
        return {"count": TensorSpec(()), "quantiles": TensorSpec((QUANTILES,))}

    def aggregate(self, server: FedDyMemServer, updates: Mapping[int, Update]) -> None:
        """Pools the median."""
        messages = [update.message for update in updates.values()]
        median = pool_quantile([m["quantiles"] for m in messages], [float(m["count"]) for m in messages], 0.5)
        server.known["threshold"] = torch.tensor(median)


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
