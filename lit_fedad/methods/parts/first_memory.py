"""The exchange in which clients send the first memories of a shared bank."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch.utils.data import DataLoader

from lit_fedad.contracts import Exchange, Free, Message, MessageSpec, TensorSpec, Update
from lit_fedad.contracts.disclosure import Disclosure, Kind
from lit_fedad.core.errors import UserError

if TYPE_CHECKING:
    from lit_fedad.methods.feddymem import FedDyMemClient, FedDyMemServer

MEMORY = Disclosure(Kind.PATCHES, "mean features of groups of like patches, of few patches or of one")
"""What a memory tells of a client's images."""


class FirstMemory(Exchange["FedDyMemClient", "FedDyMemServer"]):
    """The set-up exchange in which clients send memories of untrained features, merged to the first shared one."""

    name = "memory"

    def broadcast(self, server: FedDyMemServer, client_id: int) -> Message:
        """Returns statistics and subspace, and the number of vectors to send where clients share in them."""
        shared = {} if server.oversampling is None else {"vectors": torch.tensor(server.first_vectors)}
        return {**server.broadcast(client_id), **shared}

    def broadcast_spec(self, client: FedDyMemClient) -> MessageSpec:
        """Declares the form of `broadcast`."""
        vectors = TensorSpec((), torch.int64, low=1, high=client.task.slots)
        shared = {} if client.oversampling is None else {"vectors": vectors}
        return {**client.features_spec(), **shared}

    def receive(self, client: FedDyMemClient, message: Message) -> None:
        """Loads the message."""
        client.receive(message)
        client.first_vectors = int(message.get("vectors", client.task.slots))

    discloses = (MEMORY,)

    def send(self, client: FedDyMemClient, loader: DataLoader) -> Message:
        """Returns a first memory."""
        return client.first_memory(loader)

    def upload_spec(self, client: FedDyMemClient) -> MessageSpec:
        """Declares a memory of as many vectors as the server asked for."""
        rows = None if client.oversampling is None else Free("vectors", client.task.slots)
        return client.memory_spec("counts", "radii", slots=rows)

    def validate(self, server: FedDyMemServer, client_id: int, update: Update) -> None:
        """Checks the number of vectors, and the counts."""
        if len(update.message["memory"]) != server.first_vectors:
            raise UserError(
                f"the client sent {len(update.message['memory'])} vectors instead of {server.first_vectors}"
            )
        server.validate(client_id, update)

    def aggregate(self, server: FedDyMemServer, updates: Mapping[int, Update]) -> None:
        """Merges the memories."""
        server.aggregate(updates)
