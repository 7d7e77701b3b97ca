"""Messages between clients and the server, and their declared form."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

Message = dict[str, Tensor]
"""A message between a client and the server: named tensors on the CPU with finite values."""

MessageSpec = Mapping[str, "TensorSpec"]
"""The declared form of a message: shape and type by name."""


@dataclass(frozen=True)
class TensorSpec:
    """The declared form of one tensor of a message.

    Attributes:
        shape: Sizes; None where a size is free.
        dtype: Element type.
    """

    shape: tuple[int | None, ...]
    dtype: torch.dtype = torch.float32


@dataclass(frozen=True)
class Update:
    """The message that one client sent, and its number of training images."""

    message: Message
    num_samples: int


def spec_of(entries: Mapping[str, Tensor]) -> MessageSpec:
    """Declares messages with the names, shapes and types of given tensors.

    Example:
        >>> spec_of({"w": torch.zeros(2, 3)})
        {'w': TensorSpec(shape=(2, 3), dtype=torch.float32)}
    """
    return {name: TensorSpec(tuple(entry.shape), entry.dtype) for name, entry in entries.items()}
