"""Blocks that compute in full precision, whatever the precision around them."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def full_precision(tensor: Tensor) -> AbstractContextManager[object]:
    """Disables autocast on a tensor's device for a block; tensors that are in half precision already stay so.

    Args:
        tensor: A tensor that the block computes with.

    Example:
        >>> with torch.autocast("cpu", dtype=torch.bfloat16), full_precision(torch.eye(2)):
        ...     (torch.eye(2) @ torch.eye(2)).dtype
        torch.float32
    """
    if torch.compiler.is_exporting():  # nothing casts there, and graphs with such a block fail torch's checks
        return nullcontext()
    return torch.autocast(tensor.device.type, enabled=False)
