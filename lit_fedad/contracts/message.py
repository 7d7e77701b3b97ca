"""What crosses between a client and the server, and its declared form."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

Message = dict[str, Tensor]
"""All that ever crosses between a client and the server: flat, named, on the CPU, finite."""

MessageSpec = Mapping[str, "TensorSpec"]
"""The declared form of a message: every name with its shape and type."""


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
    """What one client sent: its message and the number of training images behind it."""

    message: Message
    num_samples: int


def spec_of(entries: Mapping[str, Tensor]) -> MessageSpec:
    """Declares messages of the very names, shapes and types of some entries of a state.

    Example:
        >>> spec_of({"w": torch.zeros(2, 3)})
        {'w': TensorSpec(shape=(2, 3), dtype=torch.float32)}
    """
    return {name: TensorSpec(tuple(entry.shape), entry.dtype) for name, entry in entries.items()}
