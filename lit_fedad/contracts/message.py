"""What crosses between a client and the server, and its declared form."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

Message = dict[str, Tensor]
"""All that ever crosses between a client and the server: flat, named, on the CPU, finite."""

Payload = Mapping[str, "TensorSpec"]
"""What a message must look like: every name with its shape and type."""


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
