"""Second moments of features, which clients send once for each stage of their data and the server adds up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lit_fedad.contracts import (
    Context,
    Exchange,
    Free,
    Message,
    MessageSpec,
    Sums,
    TensorSpec,
    Update,
)
from lit_fedad.contracts.disclosure import DisclosedBy, Disclosures, summed
from lit_fedad.core.errors import UserError
from lit_fedad.memory.moments import Moments, check_covariance, symmetric, upper_triangle
from lit_fedad.methods.parts.feature_sums import MomentSums
from lit_fedad.methods.parts.pooled_statistics import check_count
from lit_fedad.tasks.patches import PatchTask


class MeasuresOnce(Protocol):
    """A client that sends the moments of each of its stages once.

    Attributes:
        context: The client's stage.
        sets: Number of sets of moments that the task needs.
        measured: Number of stages whose moments it has sent.
    """

    context: Context
    sets: int
    measured: int

    @property
    def task(self) -> PatchTask:
        """Features."""


class HoldsMoments(Protocol):
    """A server that adds moments up.

    Attributes:
        moments: ``count``, ``mean`` and ``covariance`` by set, of all that was sent so far; empty before.
        measured: Number of each client's images behind them, over all of its stages.
    """

    moments: Message
    measured: dict[int, int]

    def learn(self) -> None:
        """Computes what follows from the moments, after they have changed."""


def new_moments(client: MeasuresOnce, loader: DataLoader) -> Message:
    """Returns ``count`` [n], ``mean`` [k, C] and ``covariance`` [k, C (C + 1) / 2] of a client's patches.

    n is the number of sets in the first message of each stage, and 0 later: what was sent before is not added twice.
    Of these, k count a patch. The covariance divides by the count, and is packed by `upper_triangle`.
    """
    stage = client.context.stage
    sets = [] if client.measured > stage else client.task.moments(loader)
    client.measured = max(client.measured, stage + 1)
    return packed(sets, client.task.num_features)


def packed(sets: Sequence[Moments], channels: int) -> Message:
    """Packs moments by set as `new_moments` describes; of no set, the message of a client with nothing new."""
    held = [part for part in sets if part.count]
    means, triangles = torch.zeros(0, channels), torch.zeros(0, channels * (channels + 1) // 2)
    if held:
        means = torch.stack([part.mean for part in held]).float()
        triangles = upper_triangle(torch.stack([part.covariance.float() for part in held]))
    count = torch.tensor([part.count for part in sets], dtype=torch.int64)
    return {"count": count, "mean": means, "covariance": triangles}


def unpacked(message: Mapping[str, Tensor]) -> list[Moments]:
    """Unpacks `packed`: the moments by set, float64 on the CPU."""
    means, channels = message["mean"].double().cpu(), message["mean"].shape[1]
    covariances = symmetric(message["covariance"].double().cpu(), channels)
    held = zip(means, covariances, strict=True)
    return [
        Moments(count, *next(held)) if count else Moments.none(channels)
        for count in message["count"].tolist()
    ]


def moments_disclosed(task: PatchTask) -> Disclosures:
    """Declares what moments tell: of all images together, or of each product's."""
    if task.kinds == 1 or task.moment_sets == 1:
        return (summed("mean and covariance of all patches' features"),)
    return (summed("mean and covariance of the features of each product's patches", by_product=True),)


def moments_spec(client: MeasuresOnce) -> MessageSpec:
    """Declares the form of `new_moments`."""
    return packed_spec(Free("sets", client.sets), client.sets, client.task.num_features)


def packed_spec(sets: int | Free, most: int, channels: int) -> MessageSpec:
    """Declares the form of `packed`, of at most so many sets."""
    filled = Free("filled", most)
    return {
        "count": TensorSpec((sets,), torch.int64, low=0, counted=True),
        "mean": TensorSpec((filled, channels)),
        "covariance": TensorSpec((filled, channels * (channels + 1) // 2)),
    }


def subspace_spec(task: PatchTask) -> MessageSpec:
    """Declares the subspaces of normal features by product: ``centre`` [N, C] and ``basis`` [N, C, R]."""
    channels, products = task.num_features, Free("products", task.kinds)
    basis = TensorSpec((products, channels, Free("directions", channels)))
    return {"centre": TensorSpec((products, channels)), "basis": basis}


def check_moments(update: Update, sets: int, vectors_per_image: int, needed: bool) -> None:
    """Checks what the form of `new_moments` cannot say.

    Args:
        update: A client's message.
        sets: Number of sets, if any are sent.
        vectors_per_image: Number of feature vectors of an image.
        needed: Whether moments must be in it.

    Raises:
        UserError: If they are missing, count more vectors than the client's images have, or are no covariance.
    """
    counts, rows = update.message["count"], len(update.message["mean"])
    filled = int(counts.count_nonzero())
    if len(counts) and not filled:
        raise UserError("the client sent moments of no image")
    if rows != filled:
        raise UserError(f"the client sent {rows} sets of moments, and counts patches of {filled}")
    parts = unpacked(update.message)
    if len(parts) != sets and (needed or parts):
        raise UserError(f"the client sent {len(parts)} sets of moments, instead of {sets}")
    for part in parts:
        check_count(part.count, update.num_samples * vectors_per_image)
        check_covariance(part.covariance)


def add_moments(server: HoldsMoments, updates: Mapping[int, Update]) -> None:
    """Adds the clients' new moments to the server's, which learns from them if there are any."""
    new = [parts for update in updates.values() if (parts := unpacked(update.message))]
    if new:
        known = [held_moments(server.moments)] if server.moments else []
        total = [Moments.union(parts) for parts in zip(*known, *new, strict=True)]
        server.moments = {
            "count": torch.tensor([part.count for part in total]),
            "mean": torch.stack([part.mean for part in total]),
            "covariance": torch.stack([part.covariance for part in total]),
        }
        for client, update in updates.items():
            images = update.num_samples if len(update.message["count"]) else 0
            server.measured[client] = server.measured.get(client, 0) + images
        server.learn()


def held_moments(moments: Message) -> list[Moments]:
    """Returns a server's moments by set, which are kept as tensors."""
    rows = zip(moments["count"].tolist(), moments["mean"], moments["covariance"], strict=True)
    return [Moments(count, mean, covariance) for count, mean, covariance in rows]


@dataclass(frozen=True)
class PooledMoments(Exchange[MeasuresOnce, HoldsMoments]):
    """The exchange in which clients send the moments of their patches, which the server adds up.

    Attributes:
        sets: See `MeasuresOnce`.
        vectors_per_image: Number of feature vectors of an image.
    """

    sets: int
    vectors_per_image: int
    name = "moments"
    down = False
    joining = "skip"  # what a client has not sent yet, it sends in its first round
    sums = Sums(lambda client: MomentSums(client.task.vectors_per_image))

    discloses = DisclosedBy(lambda client: moments_disclosed(client.task))

    def send(self, client: MeasuresOnce, loader: DataLoader) -> Message:
        """Returns new moments."""
        return new_moments(client, loader)

    def upload_spec(self, client: MeasuresOnce) -> MessageSpec:
        """Declares new moments."""
        return moments_spec(client)

    def validate(self, server: HoldsMoments, client_id: int, update: Update) -> None:
        """Checks count and covariance."""
        check_moments(update, self.sets, self.vectors_per_image, needed=not server.moments)

    def aggregate(self, server: HoldsMoments, updates: Mapping[int, Update]) -> None:
        """Adds the moments up."""
        add_moments(server, updates)
