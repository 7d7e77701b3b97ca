"""FedDyMem: clients share a small bank of normal patch features instead of weights (arXiv 2502.21012).

Measured on real images (ResNet-18, 128 pixels, 3 seeds; docs/results.md, docs/feddymem.md): the shared memory is far
better than local training, and close to, or better than, a centralised nearest-neighbour bank. The method as printed in
the paper (`feddymem_literal`) collapses, because FedDyMem Eq. 14, FedDyMem Eq. 15 and FedDyMem Eq. 16 average slots by
position, but k-means returns them in arbitrary order; and training after the first shared memory changes little.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

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
from lit_fedad.errors import UserError
from lit_fedad.federation.aggregation import pool_quantile
from lit_fedad.federation.local_training import Train
from lit_fedad.guards.bounds import at_least
from lit_fedad.memory.kmeans import kmeans
from lit_fedad.memory.knn import nearest
from lit_fedad.methods.parts.pooled_statistics import (
    check_count,
    load_statistics,
    pool_channels,
    statistics_spec,
)
from lit_fedad.tasks.memory_bank import QUANTILES, MemoryBank


class Aggregation(Protocol):
    """The server's aggregation of N uploaded memories to one of the same size."""

    def __call__(
        self, memories: Tensor, counts: Tensor, previous: Tensor | None, generator: torch.Generator
    ) -> Tensor:
        """Aggregates memories [N, slots, C] with numbers of patches [N, slots] to one memory [slots, C].

        Args:
            memories: Uploaded memories [N, slots, C].
            counts: Number of patches of each slot [N, slots].
            previous: The last shared memory [slots, C]; None for the first.
            generator: Draws initial centroids.
        """


class KMeansAggregation:
    """A clustering of all uploaded vectors to a new memory by k-means (FedDyMem Alg. 3).

    Args:
        weighted: Whether vectors are weighted by their numbers of patches; not so in the paper.
        continued: Whether the last memory initialises Lloyd's algorithm, so that slots correspond between rounds; the
            paper draws new initial centroids in each round.
        max_steps: Number of Lloyd steps.
    """

    def __init__(self, weighted: bool = False, continued: bool = False, max_steps: int = 20) -> None:
        at_least("method.server.aggregation", 1, max_steps=max_steps)
        self.weighted, self.continued, self.max_steps = weighted, continued, max_steps

    def __call__(
        self, memories: Tensor, counts: Tensor, previous: Tensor | None, generator: torch.Generator
    ) -> Tensor:
        """Aggregates memories; see `Aggregation`."""
        return kmeans(
            memories.flatten(0, 1),
            memories.shape[1],
            weights=counts.flatten() if self.weighted else None,
            initial=previous if self.continued else None,
            generator=generator,
            max_steps=self.max_steps,
        ).centroids


class MeanAggregation:
    """The mean of the memories slot by slot: the ablation without k-means (FedDyMem Table III)."""

    def __call__(
        self, memories: Tensor, counts: Tensor, previous: Tensor | None, generator: torch.Generator
    ) -> Tensor:
        """Aggregates memories; see `Aggregation`."""
        return memories.mean(0)


class FedDyMemClient(Client):
    """A client that trains its own head against the shared memory, and uploads its patches compressed to a memory.

    Head and optimiser are personal: they are never averaged (FedDyMem Alg. 5).

    Args:
        task: Features, head, loss and bank.
        local_epochs: Passes over the client's data per round (E).
        keep_optimizer: Whether AdamW's state is kept between rounds.
        send_counts: Whether each slot's number of patches and radius are sent too, two values per slot.
        independent_init: Whether every client draws its own initial head, as printed in FedDyMem Alg. 4. Features of
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
        """The first memory, channel statistics and a pooled threshold where the task requires them; then training."""
        statistics = (pool_channels(self.task),) if self.task.standardise else ()
        threshold = (PooledThreshold(),) if isinstance(self.task.loss.threshold, str) else ()
        return Exchanges((*statistics, FirstMemory(), *threshold), (Train(),))

    @property
    def head(self) -> dict[str, Tensor]:
        """Weights of the personal head; empty where the task has no head."""
        return {} if self.task.head is None else self.task.head.state_dict()

    @head.setter
    def head(self, weights: Mapping[str, Tensor]) -> None:
        if self.task.head is not None:
            self.task.head.load_state_dict(weights)

    def receive(self, message: Message) -> None:
        """Loads statistics, memory and threshold, as far as the message holds them; a new client may draw its head."""
        task = self.task
        if self.independent_init and not self.drew_head and task.head is not None:
            with seeded(self.context.seed, "head", client=self.context.client):
                task.head.reset_parameters()  # type: ignore[operator]
        self.drew_head = True
        load_statistics(task, message)
        if "memory" in message:
            task.load_memory(message["memory"], message.get("radii"))
        if "threshold" in message:
            task.threshold = message["threshold"].to(task.threshold)

    def broadcast_spec(self) -> MessageSpec:
        """Declares statistics, memory and threshold; in the paper only the memory, float32 [slots, C]."""
        threshold = {"threshold": TensorSpec((), low=0)} if isinstance(self.task.loss.threshold, str) else {}
        return {**statistics_spec(self.task), **self.memory_spec("radii"), **threshold}

    def send(self, loader: DataLoader) -> Message:
        """Returns the client's patches compressed to a memory, which updates the shared one."""
        return self.compressed(loader, self.task.memory)

    def upload_spec(self) -> MessageSpec:
        """Declares a memory, float32 [slots, C]."""
        return self.memory_spec("counts", "radii")

    def compressed(self, loader: DataLoader, previous: Tensor | None) -> Message:
        """Compresses the client's patches to a memory.

        Args:
            loader: The client's batches in a fixed order.
            previous: The shared memory [slots, C]; None for the first.
        """
        reduced = self.task.reduce_memory(loader, self.context, previous)
        message = {"memory": reduced.memory.float()}
        return {**message, "counts": reduced.counts, "radii": reduced.radii} if self.send_counts else message

    def memory_spec(self, *per_slot: str) -> MessageSpec:
        """Declares a memory, and the values of each slot where they are sent."""
        slots = (self.task.slots,)
        known = {"counts": TensorSpec(slots, low=0, counted=True), "radii": TensorSpec(slots, low=0)}
        own = {name: known[name] for name in per_slot} if self.send_counts else {}
        return {"memory": TensorSpec((self.task.slots, self.task.num_features), unordered=True), **own}


class FedDyMemServer(AttackableServer):
    """The server, which clusters the uploaded memories to the next one (FedDyMem Alg. 3).

    Args:
        client: A client, for sizes.
        aggregation: Aggregation of N memories to one.
        collapse: Share of the memory's initial spread below which the server warns of a collapse.
    """

    kept = ("statistics", "known", "first_spread", "latest")

    def __init__(self, client: FedDyMemClient, aggregation: Aggregation, collapse: float = 0.5) -> None:
        super().__init__()
        self.counted = client.send_counts
        at_least("method.server", 0, collapse=collapse)
        # A slot of a map that each image fills counts the image, so that there are as many counts as slots.
        self.slots, self.vectors_per_image = client.task.slots, client.task.vectors_per_image
        self.counts_per_image = max(self.vectors_per_image, self.slots)
        self.neighbours = client.task.loss.neighbours
        self.aggregation, self.collapse = aggregation, collapse
        self.statistics: Message = {}
        self.known: Message = {}
        self.first_spread: float | None = None
        self.latest: dict[str, float] = {}

    def broadcast(self, client_id: int) -> Message:
        """Returns statistics, memory and threshold as far as they exist, the same to every client."""
        return {**self.statistics, **self.known}

    def validate(self, client_id: int, update: Update) -> None:
        """Checks that the slots count as many patches as the client's images have, or one each."""
        if self.counted:
            total = float(update.message["counts"].double().sum())
            check_count(total, update.num_samples * self.counts_per_image)
            if total < 0.999 * min(self.slots, update.num_samples * self.vectors_per_image):
                raise UserError(f"the client's slots count {total:g} patches, too few for its images")

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
        """Loads the uploaded bank with the initial head of clients: trained heads are never sent."""
        assert isinstance(client, FedDyMemClient)
        client.task.load_memory(update.message["memory"], update.message.get("radii"))

    def diagnostics(self) -> dict[str, float]:
        """Returns the memory's spread (root of the summed slot variance) and the agreement of the clients."""
        return dict(self.latest)

    def warnings(self) -> list[str]:
        """Returns one line once the memory has collapsed."""
        spread = self.latest.get("memory_spread")
        if spread is None or self.first_spread is None or spread >= self.collapse * self.first_spread:
            return []
        share = spread / self.first_spread
        return [
            f"round {self.context.round}: the memory is collapsing: its spread is {share:.0%} of what it was at first"
        ]


class _SendState(Exchange[FedDyMemClient, FedDyMemServer]):
    """An exchange in which clients receive all that the server has so far: statistics, memory, threshold."""

    def broadcast(self, server: FedDyMemServer, client_id: int) -> Message:
        """Returns the server's message."""
        return server.broadcast(client_id)

    def receive(self, client: FedDyMemClient, message: Message) -> None:
        """Loads the message."""
        client.receive(message)


class FirstMemory(_SendState):
    """The set-up exchange in which clients send memories of untrained features, merged to the first shared one."""

    name = "memory"

    def broadcast_spec(self, client: FedDyMemClient) -> MessageSpec:
        """Declares pooled statistics."""
        return statistics_spec(client.task)

    def send(self, client: FedDyMemClient, loader: DataLoader) -> Message:
        """Returns a first memory."""
        return client.compressed(loader, previous=None)

    def upload_spec(self, client: FedDyMemClient) -> MessageSpec:
        """Declares a memory."""
        return client.upload_spec()

    def validate(self, server: FedDyMemServer, client_id: int, update: Update) -> None:
        """Checks the counts."""
        server.validate(client_id, update)

    def aggregate(self, server: FedDyMemServer, updates: Mapping[int, Update]) -> None:
        """Merges the memories."""
        server.aggregate(updates)


class PooledThreshold(_SendState):
    """The set-up exchange in which clients send quantiles of distances to the first memory; th is their median."""

    name = "threshold"

    def broadcast_spec(self, client: FedDyMemClient) -> MessageSpec:
        """Declares statistics and memory."""
        return {**statistics_spec(client.task), **client.memory_spec("radii")}

    def send(self, client: FedDyMemClient, loader: DataLoader) -> Message:
        """Returns the number of the client's distances, and their quantiles."""
        quantiles, count = client.task.neighbour_quantiles(loader)
        return {"count": torch.tensor(count), "quantiles": quantiles}

    def upload_spec(self, client: FedDyMemClient) -> MessageSpec:
        """Declares the form of `send`."""
        return {"count": TensorSpec((), torch.int64, low=1), "quantiles": TensorSpec((QUANTILES,), low=0)}

    def validate(self, server: FedDyMemServer, client_id: int, update: Update) -> None:
        """Checks the number of distances, and that the quantiles ascend."""
        count, most = int(update.message["count"]), update.num_samples * server.counts_per_image
        check_count(count, most * server.neighbours)
        if (update.message["quantiles"].diff() < 0).any():
            raise UserError("the client's quantiles do not ascend")

    def aggregate(self, server: FedDyMemServer, updates: Mapping[int, Update]) -> None:
        """Computes the pooled median."""
        messages = [update.message for update in updates.values()]
        median = pool_quantile([m["quantiles"] for m in messages], [float(m["count"]) for m in messages], 0.5)
        server.known["threshold"] = torch.tensor(median)


def merge_radii(memories: Tensor, counts: Tensor, radii: Tensor, merged: Tensor) -> Tensor:
    """Computes the root mean square distance of all clients' patches to their merged slot.

    Uploaded vectors are means of their patches: the mean square distance of patches to a merged slot is their mean
    square distance to the vector plus the square distance from the vector to the slot.

    Args:
        memories: Uploaded memories [N, slots, C].
        counts: Number of patches of each vector [N, slots].
        radii: Root mean square distance of these patches to their vector [N, slots].
        merged: The merged memory [slots, C].

    Returns:
        Radii [slots]; those of slots without a patch are the root mean square of the others.
    """
    offsets, at = nearest(memories.flatten(0, 1), merged, 1)
    squares = radii.flatten().double().square() + offsets[:, 0].double().square()
    weights = counts.flatten().double()
    mass = torch.bincount(at[:, 0], weights, minlength=len(merged))
    total = torch.bincount(at[:, 0], weights * squares, minlength=len(merged))
    typical = total.sum() / mass.sum()
    return torch.where(mass > 0, total / mass.clamp(min=1e-12), typical).sqrt().float()


def agreement(memories: Tensor, merged: Tensor) -> float:
    """Computes the agreement of the clients: 1 if every upload lies in the merged memory, 0 if unrelated.

    It is the mean cosine between uploaded vectors and their nearest merged slots, both minus the merged memory's mean.

    Args:
        memories: Uploaded memories [N, slots, C].
        merged: The merged memory [slots, C].
    """
    vectors, centre = memories.flatten(0, 1), merged.mean(0)
    _, at = nearest(vectors, merged, 1)
    return float(torch.cosine_similarity(vectors - centre, merged[at[:, 0]] - centre, dim=1).mean())
