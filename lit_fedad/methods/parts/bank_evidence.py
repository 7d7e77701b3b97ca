"""Says what banks and moments in messages show of single images (`Evidence`)."""

from functools import partial

import torch
from torch import Tensor

from lit_fedad.contracts import Client, Message, MessageSpec, Server, Update
from lit_fedad.contracts.evidence import (
    Invertible,
    SentBank,
    SharedBank,
    SharedMoments,
    SharedSubspace,
    Shown,
)
from lit_fedad.core.errors import UserError
from lit_fedad.memory.moments import Moments, MomentSets
from lit_fedad.memory.reduce import PositionReduce
from lit_fedad.models.large_images import TiledPyramid
from lit_fedad.tasks.memory_bank import MemoryBank
from lit_fedad.tasks.patches import PatchTask


def bank_sent(client: Client, received: Message, sent: Message) -> list[Shown]:
    """Lists what an upload shows of single images: the client's own vectors in its bank, and its moments."""
    task, shown = client.task, list[Shown]()
    assert isinstance(task, MemoryBank)
    if len(sent.get("memory", ())):
        vectors = own_vectors(task, received, sent, client.context.round)
        if len(vectors):
            shown.append(SharedBank(vectors.to(task.device), task))
    return [*shown, *moments_sent(client, received, sent)]


def bank_received(client: Client, received: Message) -> list[Shown]:
    """Lists the bank and the subspace in the server's message."""
    task = client.task
    assert isinstance(task, MemoryBank)
    bank = [SharedBank(task.memory, task)] if len(received.get("memory", ())) else []
    return [*bank, *subspace_received(client, received)]


def predict_with_bank(server: Server, client: Client, update: Update) -> None:
    """Loads the uploaded bank with the initial head of clients: trained heads are never sent; see `Evidence`."""
    assert isinstance(client.task, MemoryBank)
    client.task.load_memory(update.message["memory"], update.message.get("radii"))


def moments_sent(client: Client, received: Message, sent: Message) -> list[Shown]:
    """Lists the moments of a client's patches in an upload; for a bank with a subspace those that the subspace uses."""
    task = client.task
    assert isinstance(task, PatchTask)
    if "covariance" not in sent or not len(sent["count"]):
        return []
    sets, average_pool = list(MomentSets.of_message(sent)), None
    if isinstance(task, MemoryBank) and task.subspace is not None:
        sets, average_pool = task.subspace_moments(sets), True
    moments = Moments.union(sets)
    embed = partial(task.embed, average_pool=average_pool)
    return [SharedMoments(moments.mean, moments.covariance, lambda batch: embed(batch).cpu())]


def subspace_received(client: Client, received: Message) -> list[Shown]:
    """Lists the subspace of normal features in the server's message."""
    task = client.task
    assert isinstance(task, PatchTask)
    if "basis" not in received:
        return []
    average_pool = True if isinstance(task, MemoryBank) else None
    embed = partial(task.embed, average_pool=average_pool)
    return [SharedSubspace(received["centre"], received["basis"], embed)]


def own_vectors(task: MemoryBank, received: Message, sent: Message, round: int) -> Tensor:
    """Computes a client's own vectors from the bank that it sent, as the server could.

    Where the client moved its bank towards the shared one, FedDyMem Eq. 16 is undone: ``m = own / (t + 1) +
    (1 - 1 / (t + 1)) m'``. Slots without patches stay m' and are left out.

    Args:
        task: The task.
        received: The message that the client had received.
        sent: Its upload.
        round: The round t.

    Returns:
        Vectors [up to slots, C].
    """
    bank = sent["memory"]
    filled = sent["counts"] > 0 if "counts" in sent else torch.ones(len(bank), dtype=torch.bool)
    if "memory" not in received:
        return bank[filled]
    steps = 1 if task.reduce.adds_up else round + 1
    filled &= (bank != received["memory"]).any(1)
    return (received["memory"] + steps * (bank - received["memory"]))[filled]


def invertible_bank(client: Client, sent: MessageSpec, ordered: bool = False) -> Invertible | None:
    """Says that an attack can reconstruct images from the bank in an upload, if it holds one.

    Args:
        client: The client.
        sent: The declared form of the upload.
        ordered: Whether the bank keeps the positions of patches.

    Raises:
        UserError: If the upload holds a bank, and the backbone sees images in tiles.
    """
    task = client.task
    assert isinstance(task, MemoryBank)
    backbone = task.backbone
    if "memory" not in sent:
        return None
    if isinstance(backbone, TiledPyramid):  # it computes the features of tiles without gradients
        raise UserError(
            "attack=inversion: a bank is shared, but images in tiles (image.tile) are not sought in it"
        )

    def encode(images: Tensor) -> Tensor:
        # `features` runs the layers themselves: a call of the whole frozen backbone passes no gradients.
        return task({"pyramid": backbone.features(images)})

    return SentBank(
        lambda received, sent: own_vectors(task, received, sent, client.context.round),
        encode,
        lambda loader, context: task.reduce_memory(loader, context, None).memory.float(),
        ordered,
    )


def invertible_memory(client: Client, received: MessageSpec, sent: MessageSpec) -> Invertible | None:
    """Says that an attack can reconstruct images from a memory; `PositionReduce` keeps the positions of patches."""
    assert isinstance(client.task, MemoryBank)
    return invertible_bank(client, sent, ordered=isinstance(client.task.reduce, PositionReduce))
