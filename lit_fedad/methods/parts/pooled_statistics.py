"""The set-up exchanges that methods share: pooled statistics of channels and distances, and local preparation."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader

from lit_fedad.contracts import (
    Client,
    Exchange,
    Message,
    MessageSpec,
    StandardisedTask,
    Sums,
    Task,
    TensorSpec,
    Update,
)
from lit_fedad.contracts.disclosure import counted, summed
from lit_fedad.core.errors import UserError
from lit_fedad.federation.aggregation import pool_quantile, pool_statistics
from lit_fedad.methods.parts.feature_sums import ChannelSums
from lit_fedad.tasks.memory_bank import QUANTILES
from lit_fedad.tasks.patches import PatchTask


def check_count(count: float, most: int) -> None:
    """Checks a number of vectors that a client claims to have seen.

    Args:
        count: The number.
        most: The number that all its images have.

    Raises:
        UserError: If it is larger.
    """
    # Sums of rounded counts exceed their whole in the last digits.
    if count > most * 1.001:
        raise UserError(f"the client counts {count:g} vectors, but its images have {most}")


def check_slots(message: Message, images: int, patches: int, most: int, least: int | None = None) -> None:
    """Checks what the slots of a memory count: ``counts`` and, where it is sent, ``image_counts``.

    Args:
        message: The message.
        images: Most images that may lie behind it.
        patches: Patches of an image.
        most: Largest number that the slots together count for an image.
        least: Fewest images behind it; None for as many as may.

    Raises:
        UserError: If the slots count more than so many images have, or fewer patches than they fill slots.
    """
    counts, least = message["counts"], images if least is None else least
    total = float(counts.double().sum())
    check_count(total, images * most)
    if total < 0.999 * min(len(counts), least * patches):
        raise UserError(f"the client's slots count {total:g} patches, too few for its images")
    if "image_counts" in message and (message["image_counts"] > counts.clamp(max=images)).any():
        raise UserError(f"a slot counts more than the client's {images} images, or than its patches")


def whitened(task: Task) -> bool:
    """Returns whether a task's features are whitened."""
    return isinstance(task, PatchTask) and task.whiten is not None


def standardised(task: Task) -> bool:
    """Returns whether a task's features are standardised or whitened."""
    return (isinstance(task, StandardisedTask) and task.standardise) or whitened(task)


@dataclass(frozen=True)
class PooledStatistics(Exchange[Client, Any]):
    """The exchange in which clients send count, mean and variance of their channels, which the server pools.

    Attributes:
        vectors_per_image: Number of feature vectors of an image.
        shrinkage: See `channel_scale`.
    """

    vectors_per_image: int
    shrinkage: float
    name = "statistics"
    first_stage = True
    down = False
    joining = "skip"
    sums = Sums(lambda client: ChannelSums(client.task.vectors_per_image))

    discloses = (summed("mean and variance of each channel of the features"),)

    def send(self, client: Any, loader: DataLoader) -> Message:
        """Returns ``count``, ``mean`` and ``variance`` [C] over the client's data."""
        count, mean, variance = client.task.channel_moments(loader)
        return {"count": torch.tensor(count), "mean": mean, "variance": variance}

    def upload_spec(self, client: Any) -> MessageSpec:
        """Declares the form of `send`."""
        channels = (client.task.channels,)
        return {
            "count": TensorSpec((), torch.int64, low=1),
            "mean": TensorSpec(channels),
            "variance": TensorSpec(channels, low=0),
        }

    def validate(self, server: Any, client_id: int, update: Update) -> None:
        """Checks the count."""
        check_count(int(update.message["count"]), update.num_samples * self.vectors_per_image)

    def aggregate(self, server: Any, updates: Mapping[int, Update]) -> None:
        """Pools the statistics of all clients."""
        server.statistics = pool_statistics(updates, self.shrinkage)


@dataclass(frozen=True)
class Prepare(Exchange[Client, Any]):
    """The exchange in which clients receive pooled statistics, if any, and prepare with the initial weights.

    Clients send nothing and receive no weights, since all have the same initial weights.

    Attributes:
        pooled: Whether statistics have been pooled.
    """

    pooled: bool
    name = "prepare"
    up = False
    joining = "play"

    def broadcast(self, server: Any, client_id: int) -> Message:
        """Returns ``mean`` and ``scale`` [C], or an empty message."""
        return server.statistics

    def broadcast_spec(self, client: Client) -> MessageSpec:
        """Declares the form of `broadcast`."""
        return statistics_spec(client.task) if self.pooled else {}

    def receive(self, client: Client, message: Message) -> None:
        """Loads the statistics into the task."""
        load_statistics(client.task, message)

    discloses = ()

    def send(self, client: Client, loader: DataLoader) -> Message:
        """Prepares the task; returns an empty message."""
        client.task.refresh(loader, client.context, first=True)
        return {}


@dataclass(frozen=True)
class PooledThreshold(Exchange[Any, Any]):
    """The exchange in which clients send quantiles of distances to the first memory; th is their median.

    Attributes:
        neighbours: Number of distances of each patch.
    """

    neighbours: int
    name = "threshold"
    joining = "skip"
    discloses = (counted("quantiles of how far image parts lie from the shared memory"),)

    def broadcast_spec(self, client: Any) -> MessageSpec:
        """Declares statistics and memory."""
        return {**client.features_spec(), **client.memory_spec("radii")}

    def send(self, client: Any, loader: DataLoader) -> Message:
        """Returns the number of the client's distances, and their quantiles."""
        quantiles, count = client.task.neighbour_quantiles(loader)
        return {"count": torch.tensor(count), "quantiles": quantiles}

    def upload_spec(self, client: Any) -> MessageSpec:
        """Declares the form of `send`."""
        return {"count": TensorSpec((), torch.int64, low=1), "quantiles": TensorSpec((QUANTILES,), low=0)}

    def validate(self, server: Any, client_id: int, update: Update) -> None:
        """Checks the number of distances, and that the quantiles ascend."""
        count, most = int(update.message["count"]), update.num_samples * server.counts_per_image
        check_count(count, most * self.neighbours)
        if (update.message["quantiles"].diff() < 0).any():
            raise UserError("the client's quantiles do not ascend")

    def aggregate(self, server: Any, updates: Mapping[int, Update]) -> None:
        """Computes the pooled median."""
        messages = [update.message for update in updates.values()]
        median = pool_quantile([m["quantiles"] for m in messages], [float(m["count"]) for m in messages], 0.5)
        server.known["threshold"] = torch.tensor(median)


def pool_channels(task: Task) -> PooledStatistics:
    """Builds the exchange that pools the channels of a task's features.

    Raises:
        UserError: If the task needs second moments, which this exchange does not pool.
    """
    assert isinstance(task, StandardisedTask)
    if whitened(task):
        raise UserError(
            "task.whiten needs second moments: give METHOD=feddymem, federated_bank, federated_subspace or local"
        )
    return PooledStatistics(task.vectors_per_image, task.shrinkage)


def statistics_spec(task: Task) -> MessageSpec:
    """Declares pooled statistics: ``mean`` and ``scale`` [C], where the task is standardised."""
    if not standardised(task):
        return {}
    assert isinstance(task, StandardisedTask)
    channels = (task.channels,)
    # A scale below the smallest normal number turns features into infinities.
    scale = TensorSpec(channels, low=torch.finfo(torch.float32).tiny)
    triangle = {"whitening": TensorSpec((task.channels * (task.channels + 1) // 2,))}
    return {"mean": TensorSpec(channels), "scale": scale, **(triangle if whitened(task) else {})}


def load_statistics(task: Task, message: Message) -> None:
    """Loads a message's statistics, if any, into a task."""
    if "mean" in message:
        assert isinstance(task, StandardisedTask)
        task.load_statistics(*(message[name] for name in ("mean", "scale", "whitening") if name in message))
