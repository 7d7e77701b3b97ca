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


def check_count(count: float, max_count: int) -> None:
    """Checks a number of vectors that a client claims to have seen.

    Args:
        count: The claimed number.
        max_count: Number of vectors that all its images have.

    Raises:
        UserError: If the claimed number is larger.
    """
    # A sum of rounded counts may exceed the true number slightly.
    if count > max_count * 1.001:
        raise UserError(f"the client counts {count:g} vectors, but its images have {max_count}")


def check_slots(
    message: Message, max_images: int, patches: int, counts_per_image: int, min_images: int | None = None
) -> None:
    """Checks the counts of the slots of a memory: ``counts`` and, if sent, ``image_counts``.

    Args:
        message: The message.
        max_images: Largest number of images from which the memory may be computed.
        patches: Number of patches of an image.
        counts_per_image: Largest number that the slots together count for an image.
        min_images: Fewest images from which the memory is computed; None for ``max_images``.

    Raises:
        UserError: If the slots count more patches than so many images have, or fewer patches than there are slots,
            though the images have enough.
    """
    counts, min_images = message["counts"], max_images if min_images is None else min_images
    total = float(counts.double().sum())
    check_count(total, max_images * counts_per_image)
    if total < 0.999 * min(len(counts), min_images * patches):
        raise UserError(f"the client's slots count {total:g} patches, too few for its images")
    if "image_counts" in message and (message["image_counts"] > counts.clamp(max=max_images)).any():
        raise UserError(f"a slot counts more than the client's {max_images} images, or than its patches")


def whitened(task: Task) -> bool:
    """Returns whether a task's features are whitened."""
    return isinstance(task, PatchTask) and task.whiten is not None


def standardised(task: Task) -> bool:
    """Returns whether a task's features are standardised or whitened."""
    return (isinstance(task, StandardisedTask) and task.standardise) or whitened(task)


@dataclass(frozen=True)
class PooledStatistics(Exchange[Client, Any]):
    """The exchange in which clients send count, mean and variance of their features' channels; the server pools them.

    Attributes:
        vectors_per_image: Number of feature vectors that each image has.
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
    """The exchange in which clients receive pooled statistics, if any, and refresh the task under the initial weights.

    Clients send nothing and receive no weights, since all have the same initial weights.

    Attributes:
        pooled: Whether an earlier exchange has pooled statistics.
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
    """The exchange in which clients send quantiles of distances to the first memory; their median is the threshold th.

    Attributes:
        neighbours: Number of nearest slots to which each patch's distances are taken.
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
        count, max_patches = int(update.message["count"]), update.num_samples * server.counts_per_image
        check_count(count, max_patches * self.neighbours)
        if (update.message["quantiles"].diff() < 0).any():
            raise UserError("the client's quantiles do not ascend")

    def aggregate(self, server: Any, updates: Mapping[int, Update]) -> None:
        """Computes the pooled median."""
        messages = [update.message for update in updates.values()]
        median = pool_quantile([m["quantiles"] for m in messages], [float(m["count"]) for m in messages], 0.5)
        server.known["threshold"] = torch.tensor(median)


def pool_channels(task: Task) -> PooledStatistics:
    """Builds the exchange that pools the channel statistics of a task's features.

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
    """Declares pooled statistics: ``mean`` and ``scale`` [C], and ``whitening``, as far as the task uses them."""
    if not standardised(task):
        return {}
    assert isinstance(task, StandardisedTask)
    channels = (task.channels,)
    # Division by a scale below the smallest normal number would make features infinite.
    scale = TensorSpec(channels, low=torch.finfo(torch.float32).tiny)
    whitening = {"whitening": TensorSpec((task.channels * (task.channels + 1) // 2,))}
    return {"mean": TensorSpec(channels), "scale": scale, **(whitening if whitened(task) else {})}


def load_statistics(task: Task, message: Message) -> None:
    """Loads a message's statistics, if any, into a task."""
    if "mean" in message:
        assert isinstance(task, StandardisedTask)
        task.load_statistics(*(message[name] for name in ("mean", "scale", "whitening") if name in message))
