"""The set-up exchange that pools a median distance to a shared memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch.utils.data import DataLoader

from lit_fedad.contracts import Exchange, Message, MessageSpec, TensorSpec, Update
from lit_fedad.contracts.disclosure import counted
from lit_fedad.core.errors import UserError
from lit_fedad.federation.aggregation import pool_quantile
from lit_fedad.methods.parts.pooled_statistics import check_count
from lit_fedad.tasks.memory_bank import QUANTILES, MemoryBank


class HasMemory(Protocol):
    """A client with a shared memory."""

    @property
    def task(self) -> MemoryBank:
        """Features and bank."""

    def receive(self, message: Message) -> None:
        """Loads statistics and memory."""

    def features_spec(self) -> MessageSpec:
        """Declares what features depend on."""

    def memory_spec(self, *per_slot: str) -> MessageSpec:
        """Declares the memory."""


class SharesMemory(Protocol):
    """A server with a shared memory.

    Attributes:
        known: The memory, and what belongs to it.
        counts_per_image: Number of patches that count for an image.
    """

    known: Message
    counts_per_image: int

    def broadcast(self, client_id: int) -> Message:
        """Returns statistics and memory."""


@dataclass(frozen=True)
class PooledThreshold(Exchange[HasMemory, SharesMemory]):
    """The exchange in which clients send quantiles of distances to the first memory; th is their median.

    Attributes:
        neighbours: Number of distances of each patch.
    """

    neighbours: int
    name = "threshold"
    joining = "skip"

    def broadcast(self, server: SharesMemory, client_id: int) -> Message:
        """Returns statistics and memory."""
        return server.broadcast(client_id)

    def broadcast_spec(self, client: HasMemory) -> MessageSpec:
        """Declares statistics and memory."""
        return {**client.features_spec(), **client.memory_spec("radii")}

    def receive(self, client: HasMemory, message: Message) -> None:
        """Loads the message."""
        client.receive(message)

    discloses = (counted("quantiles of the distances between patches and the bank"),)

    def send(self, client: HasMemory, loader: DataLoader) -> Message:
        """Returns the number of the client's distances, and their quantiles."""
        quantiles, count = client.task.neighbour_quantiles(loader)
        return {"count": torch.tensor(count), "quantiles": quantiles}

    def upload_spec(self, client: HasMemory) -> MessageSpec:
        """Declares the form of `send`."""
        return {"count": TensorSpec((), torch.int64, low=1), "quantiles": TensorSpec((QUANTILES,), low=0)}

    def validate(self, server: SharesMemory, client_id: int, update: Update) -> None:
        """Checks the number of distances, and that the quantiles ascend."""
        count, most = int(update.message["count"]), update.num_samples * server.counts_per_image
        check_count(count, most * self.neighbours)
        if (update.message["quantiles"].diff() < 0).any():
            raise UserError("the client's quantiles do not ascend")

    def aggregate(self, server: SharesMemory, updates: Mapping[int, Update]) -> None:
        """Computes the pooled median."""
        messages = [update.message for update in updates.values()]
        median = pool_quantile([m["quantiles"] for m in messages], [float(m["count"]) for m in messages], 0.5)
        server.known["threshold"] = torch.tensor(median)
