"""The sums that a bank of mean patches and a subspace are made of, as messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lit_fedad.contracts import Context, Message, MessageSpec, TensorSpec
from lit_fedad.core.errors import UserError
from lit_fedad.memory.slot_sums import SlotSums
from lit_fedad.methods.parts.feature_sums import MomentSums, SlotMeans
from lit_fedad.methods.parts.model_sums import ModelSums, packed_moments_spec, remaining_moments
from lit_fedad.methods.parts.pooled_statistics import check_count
from lit_fedad.tasks.memory_bank import MemoryBank

if TYPE_CHECKING:
    from lit_fedad.methods.feddymem import FedDyMemClient


def made_of_sums(task: MemoryBank) -> bool:
    """Tells whether bank and subspace are sums that images can be taken out of."""
    return task.head is None and task.reduce.adds_up and isinstance(task.subspace, float)


def slot_means(task: MemoryBank) -> SlotMeans | None:
    """Returns how the clients' slots add up, with moments where the task measures some; None where they do not."""
    if task.head is not None or not task.reduce.adds_up:
        return None
    moments = MomentSums(task.vectors_per_image) if task.measures else None
    return SlotMeans(max(task.vectors_per_image, task.slots), moments)


def check_slots(message: Message, images: int, counts_per_image: int, vectors_per_image: int) -> None:
    """Checks what slots count.

    Args:
        message: ``counts`` and, where they are sent, ``image_counts`` [slots].
        images: Number of images behind them.
        counts_per_image: Number of patches that count for an image.
        vectors_per_image: Number of its patches.

    Raises:
        UserError: If they cannot be of so many images.
    """
    counts = message["counts"]
    total = float(counts.double().sum())
    check_count(total, images * counts_per_image)
    if total < 0.999 * min(len(counts), images * vectors_per_image):
        raise UserError(f"the client's slots count {total:g} patches, too few for its images")
    if "image_counts" in message and (message["image_counts"] > counts.clamp(max=images)).any():
        raise UserError(f"a slot counts more than the client's {images} images, or than its patches")


def slot_sums(messages: Sequence[Mapping[str, Tensor]], memory: Tensor, anchors: Tensor) -> Message:
    """Adds up what clients sent of their slots.

    Args:
        messages: ``counts``, ``radii`` and, where they are sent, ``image_counts`` [slots] of each client.
        memory: Mean patch of each slot over all clients [slots, C].
        anchors: The memory that patches were assigned to [slots, C].

    Returns:
        The attributes of `SlotSums`.
    """
    counts = torch.stack([m["counts"].double() for m in messages])
    squares = counts * torch.stack([m["radii"].double().square() for m in messages])
    images = torch.stack([m.get("image_counts", m["counts"]).long() for m in messages])
    return {
        "anchors": anchors,
        "sum_memory": memory.clone(),  # no two tensors of a message share memory
        "sum_counts": counts.sum(0).float(),
        "sum_squares": squares.sum(0).float(),
        "sum_images": images.sum(0),
    }


def bank_sums_spec(task: MemoryBank, sets: int) -> MessageSpec:
    """Declares `slot_sums`, moments, and whether the slots count patches of the client (``counted``, 0 or 1)."""
    rows = TensorSpec((task.slots, task.num_features), unordered=True)
    sums = TensorSpec((task.slots,), low=0)
    return {
        **packed_moments_spec(sets, task.num_features),
        "anchors": rows,
        "sum_memory": rows,
        "sum_counts": sums,
        "sum_squares": sums,
        "sum_images": TensorSpec((task.slots,), torch.int64, low=0),
        "counted": TensorSpec((), torch.int64, low=0, high=1),
    }


class BankSums(ModelSums["FedDyMemClient"]):
    """The exchange after the rounds in which clients receive the sums behind bank, radii and subspace."""

    def leave_out(self, client: FedDyMemClient, loader: DataLoader) -> None:
        """Takes images out of bank, radii and subspace."""
        leave_out_of_bank(client.task, client.sums, loader, client.context, client.min_images)


def leave_out_of_bank(
    task: MemoryBank, message: Message, loader: DataLoader, context: Context, min_images: int
) -> None:
    """Takes images of one client out of bank, radii and subspace.

    Statistics that features are standardised and whitened by stay what they are: the bank lives in these features.

    Args:
        task: The task, with the model of all images.
        message: Of the form of `bank_sums_spec`.
        loader: The images.
        context: Round and client.
        min_images: See `SlotSums.bank`.

    Raises:
        UserError: If no image remains.
    """
    moments = remaining_moments(message, task, loader)
    names = ("sum_memory", "sum_counts", "sum_squares", "sum_images")
    sums = SlotSums(message["anchors"].cpu(), *(message[name].cpu() for name in names))
    if int(message["counted"]):
        anchors = message["anchors"].to(task.memory)
        sums = sums.without(task.reduce_memory(loader, context, anchors))
    task.load_memory(*sums.bank(max(min_images, 1)))
    task.load_subspace(**task.fit_subspace(moments, task.loaded_statistics()))
