"""The exchange before all others: channel statistics, by which clients standardise features alike."""

from __future__ import annotations

import torch
from torch.utils.data import DataLoader

from lit_fedad.contracts import Message, Payload, Task, TensorSpec


def channel_statistics(task: Task, loader: DataLoader) -> Message:
    """A client's ``count``, ``mean`` and ``variance`` [C] over its own data."""
    count, mean, variance = task.channel_moments(loader)
    return {"count": torch.tensor(float(count)), "mean": mean, "variance": variance}


def statistics_payload(channels: int) -> Payload:
    """The form of `channel_statistics`."""
    per_channel = TensorSpec((channels,))
    return {"count": TensorSpec(()), "mean": per_channel, "variance": per_channel}
