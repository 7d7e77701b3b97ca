"""The exchanges before round 1 that most methods share: pooled channel statistics, and local preparation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch.utils.data import DataLoader

from lit_fedad.contracts import (
    Client,
    Exchange,
    Message,
    MessageSpec,
    Server,
    StandardisedTask,
    Task,
    TensorSpec,
    Update,
)
from lit_fedad.federation.aggregation import pool_statistics


class HoldsStatistics(Protocol):
    """A server with a place for what features are standardised by: ``mean`` and ``scale`` [C], or nothing."""

    statistics: Message


def standardised(task: Task) -> bool:
    """Tells whether a task's features are standardised."""
    return isinstance(task, StandardisedTask) and task.standardise


class PooledStatistics(Exchange[Client, Server]):
    """Clients send count, mean and variance of their channels, and the server pools them."""

    name = "statistics"

    def send(self, client: Client, loader: DataLoader) -> Message:
        """Returns ``count``, ``mean`` and ``variance`` [C] over the client's data."""
        assert isinstance(client.task, StandardisedTask)
        count, mean, variance = client.task.channel_moments(loader)
        return {"count": torch.tensor(float(count)), "mean": mean, "variance": variance}

    def upload_spec(self, client: Client) -> MessageSpec:
        """Declares `send`."""
        per_channel = TensorSpec((client.task.num_features,))
        return {"count": TensorSpec(()), "mean": per_channel, "variance": per_channel}

    def aggregate(self, server: HoldsStatistics, updates: Mapping[int, Update]) -> None:  # type: ignore[override]
        """Pools the statistics of all clients."""
        server.statistics = pool_statistics(updates)


@dataclass
class Prepare(Exchange[Client, Server]):
    """Clients receive pooled statistics, where there are any, and prepare with the initial weights.

    Nothing goes up, and no weights go down: all clients draw the same.

    Attributes:
        pooled: Whether statistics have been pooled.
    """

    pooled: bool
    name = "prepare"

    def broadcast(self, server: HoldsStatistics, client_id: int) -> Message:  # type: ignore[override]
        """Returns ``mean`` and ``scale`` [C], or nothing."""
        return server.statistics

    def broadcast_spec(self, client: Client) -> MessageSpec:
        """Declares `broadcast`."""
        return statistics_spec(client.task) if self.pooled else {}

    def receive(self, client: Client, message: Message) -> None:
        """Hands the statistics to the task."""
        load_statistics(client.task, message)

    def send(self, client: Client, loader: DataLoader) -> Message:
        """Has the task prepare; returns nothing."""
        client.task.prepare(loader, client.context)
        return {}


def statistics_spec(task: Task) -> MessageSpec:
    """Declares pooled statistics: ``mean`` and ``scale`` [C], where the task is standardised."""
    per_channel = TensorSpec((task.num_features,))
    return {"mean": per_channel, "scale": per_channel} if standardised(task) else {}


def load_statistics(task: Task, message: Message) -> None:
    """Hands a message's statistics to a task, if it holds any."""
    if "mean" in message:
        assert isinstance(task, StandardisedTask)
        task.load_statistics(message["mean"], message["scale"])
