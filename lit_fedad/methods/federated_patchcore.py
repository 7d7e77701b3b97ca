"""Federated PatchCore: coresets go up once, their union comes down (after Roth et al., CVPR 2022). Nothing trains.

The reference for what a bank of patches can do when clients may share it in one shot: at ``vectors = slots`` a client
sends and receives as many bytes as in one round of FedDyMem.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader

from lit_fedad.contracts import Client, Message, Payload, Server, TensorSpec, Update
from lit_fedad.memory.coreset import greedy_k_center
from lit_fedad.tasks.memory_bank import MemoryBank


class FederatedPatchCoreClient(Client):
    """A client: sends a greedy coreset of its patches, and scores with the bank it is sent.

    Args:
        task: Features and bank.
        vectors: Largest coreset a client sends; None for as many as the bank holds.
        projection: Dimensions of the random projection in which the coreset is chosen.
    """

    needs = MemoryBank
    task: MemoryBank

    def __init__(self, task: MemoryBank, vectors: int | None = None, projection: int = 128) -> None:
        super().__init__(task)
        self.vectors = vectors or task.slots
        self.projection = projection

    @property
    def setup_phases(self) -> tuple[str, ...]:
        """Coresets go up, then the bank comes down."""
        return ("coreset", "bank")

    def receive(self, broadcast: Message) -> None:
        """Takes over the bank."""
        if broadcast:
            self.task.load_memory(broadcast["memory"])

    @torch.no_grad()
    def send(self, loader: DataLoader) -> Message:
        """The coreset [up to vectors, C], once."""
        if self.phase != "coreset":
            return {}
        patches = torch.cat(
            [
                self.task.features(self.task.transfer_batch_to_device(batch, self.device, 0)).flatten(0, 1)
                for batch in loader
            ]
        )
        generator = self.context.generator("coreset")
        chosen = greedy_k_center(patches, self.vectors, generator=generator, projection=self.projection)
        return {"memory": patches[chosen].float().cpu()}

    def personal_state(self) -> dict[str, Any]:
        """The bank, which comes once."""
        return {**super().personal_state(), "memory": self.task.memory}

    def load_personal_state(self, state: Mapping[str, Any]) -> None:
        """Swaps another client in."""
        super().load_personal_state(state)
        self.task.load_memory(state["memory"])


class FederatedPatchCoreServer(Server):
    """The server: the union of all coresets, reduced by a second coreset where it is larger than the bank.

    Args:
        client: A client, for sizes.
    """

    def __init__(self, client: FederatedPatchCoreClient) -> None:
        super().__init__(client.setup_phases)
        self.slots, self.projection = client.task.slots, client.projection
        self.row = (None, client.task.width)
        self.known: Message = {}

    def download_payload(self) -> Payload:
        """The bank, float32 [up to slots, C], once."""
        return {"memory": TensorSpec(self.row)} if self.phase == "bank" else {}

    def upload_payload(self) -> Payload:
        """A coreset, float32 [up to vectors, C], once."""
        return {"memory": TensorSpec(self.row)} if self.phase == "coreset" else {}

    def broadcast(self, client_id: int) -> Message:
        """The same to every client."""
        return self.known if self.phase == "bank" else {}

    def aggregate(self, updates: Mapping[int, Update]) -> None:
        """Unites, and reduces, once."""
        if self.phase != "coreset":
            return
        union = torch.cat([update.message["memory"] for update in updates.values()])
        if len(union) > self.slots:
            generator = self.context.generator("coreset")
            union = union[greedy_k_center(union, self.slots, generator=generator, projection=self.projection)]
        self.known = {"memory": union}

    def state_dict(self) -> dict[str, Any]:
        """The bank."""
        return {"known": self.known}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores `state_dict`."""
        self.known = dict(state["known"])
