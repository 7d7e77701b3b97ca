"""The sums that a bank of mean patches and a subspace are made of, as messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from lit_fedad.contracts import Message, MessageSpec, TensorSpec
from lit_fedad.core.errors import UserError
from lit_fedad.methods.parts.feature_sums import MomentSums, SlotMeans
from lit_fedad.methods.parts.model_sums import sent_moments_spec
from lit_fedad.methods.parts.pooled_statistics import check_count
from lit_fedad.tasks.memory_bank import MemoryBank


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
        **sent_moments_spec(sets, task.num_features),
        "anchors": rows,
        "sum_memory": rows,
        "sum_counts": sums,
        "sum_squares": sums,
        "sum_images": TensorSpec((task.slots,), torch.int64, low=0),
        "counted": TensorSpec((), torch.int64, low=0, high=1),
    }
