"""Federated PatchCore: clients send coresets once and receive their union (after Roth et al., CVPR 2022).

Nothing is trained. The original uses the second and third stage of its backbone; this method uses all layers that are
configured. The released code's image score is the distance of the farthest patch, which the paper weights by how
rare its nearest vector is in the bank; here it is the peak of a smoothed map without its rim. Maps are of distances,
those of the released code of their squares. `backbone.layers=[2,3] task.rim=0 task.image_sigma=0` come near that code.
The method is the reference for a bank of patches that is shared in one shot: at ``vectors = slots`` a client sends and
receives as many bytes as in one round of FedDyMem.
"""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lit_fedad.contracts import (
    Client,
    Evidence,
    Exchange,
    Exchanges,
    Free,
    Message,
    MessageSpec,
    Predictors,
    Server,
    TensorSpec,
    Update,
)
from lit_fedad.contracts.compute import map_batches
from lit_fedad.contracts.disclosure import Disclosure, Kind
from lit_fedad.core.bounds import at_least
from lit_fedad.core.errors import UserError
from lit_fedad.memory.coreset import greedy_k_center
from lit_fedad.methods.parts.bank_evidence import bank_received, bank_sent, invertible_bank
from lit_fedad.tasks.memory_bank import MemoryBank


class FederatedPatchCoreClient(Client):
    """A client that sends a greedy coreset of its patches, and scores with the received bank.

    Args:
        task: Features and bank.
        vectors: Size of a client's coreset; None for the size of the bank.
        projection: Dimensions of the random projection in which the coreset is selected.

    Raises:
        UserError: If a number is out of range, or the task uses more than the patch features of the backbone.
    """

    needs = MemoryBank
    predictors = Predictors(shared=True)
    task: MemoryBank

    def __init__(self, task: MemoryBank, vectors: int | None = None, projection: int = 128) -> None:
        super().__init__(task)
        at_least("method.client", 1, vectors=vectors, projection=projection)
        for key in ("head", "standardise", "whiten", "subspace", "image_score"):
            if getattr(task, key) not in (None, False):
                raise UserError(
                    f"task.{key}: coresets are of patches as the backbone gives them, and nothing else is shared or"
                    f" trained; give task.{key}={'false' if key == 'standardise' else 'null'}"
                )
        self.vectors = vectors or task.slots
        self.projection = projection

    def receive(self, message: Message) -> None:
        """Loads the bank into the task."""
        self.task.load_memory(message["memory"])

    def broadcast_spec(self) -> MessageSpec:
        """Declares the bank, float32 [up to slots, C]."""
        return {"memory": _bank(self.task.slots, self)}


class FederatedPatchCoreServer(Server):
    """The server, which holds the union of all coresets, reduced by a second coreset to the size of the bank.

    Args:
        client: A client, for sizes.
    """

    state_names = ("bank",)

    def __init__(self, client: FederatedPatchCoreClient) -> None:
        super().__init__()
        self.slots, self.projection = client.task.slots, client.projection
        self.bank: Message = {}

    def broadcast(self, client_id: int) -> Message:
        """Returns the bank, the same to every client."""
        return self.bank


def reduced(vectors: Tensor, size: int, side: FederatedPatchCoreClient | FederatedPatchCoreServer) -> Tensor:
    """Reduces vectors [n, C] to a greedy coreset."""
    generator = side.context.generator("coreset")
    return vectors[greedy_k_center(vectors, size, generator=generator, projection=side.projection)]


class Coreset(Exchange[FederatedPatchCoreClient, FederatedPatchCoreServer]):
    """The set-up exchange in which clients send coresets, and the server unites them."""

    name = "coreset"
    down = False

    discloses = (
        Disclosure(
            Kind.PATCHES, "features of single patches of images, as they are, which all sites receive"
        ),
    )

    @torch.no_grad()
    def send(self, client: FederatedPatchCoreClient, loader: DataLoader) -> Message:
        """Selects a greedy coreset [up to vectors, C] of the client's patches."""
        patches = map_batches(client.task, loader, lambda batch: client.task(batch).flatten(0, 1))
        coreset = reduced(torch.cat(list(patches)), client.vectors, client)
        return {"memory": coreset.float().cpu()}

    def upload_spec(self, client: FederatedPatchCoreClient) -> MessageSpec:
        """Declares a coreset, float32 [up to vectors, C]."""
        return {"memory": _bank(client.vectors, client)}

    def aggregate(self, server: FederatedPatchCoreServer, updates: Mapping[int, Update]) -> None:
        """Unites the coresets, and reduces them to the size of the bank."""
        union = torch.cat([update.message["memory"] for update in updates.values()])
        if len(union) > server.slots:
            union = reduced(union.to(server.device), server.slots, server).cpu()
        server.bank = {"memory": union}


class Bank(Exchange[FederatedPatchCoreClient, FederatedPatchCoreServer]):
    """The set-up exchange in which clients receive the bank."""

    name = "bank"
    up = False


def _bank(vectors: int, client: FederatedPatchCoreClient) -> TensorSpec:
    return TensorSpec((Free("vectors", vectors), client.task.num_features), unordered=True)


def exchanges(client: FederatedPatchCoreClient) -> Exchanges:
    """Lists coresets to the server and the bank to the clients, before round 1; nothing in rounds."""
    evidence = Evidence(
        bank_sent, bank_received, invertible=lambda client, received, sent: invertible_bank(client, sent)
    )
    return Exchanges((Coreset(), Bank()), evidence=evidence)
