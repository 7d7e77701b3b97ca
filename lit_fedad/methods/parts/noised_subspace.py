"""The exchanges that find a subspace of normal features under differential privacy: three noised sums over images.

Features are projected on a few directions of public pictures. The first sum is their mean; the second their products
around it; these give coordinates in which usual features vary alike in all directions, so that noise, which is alike in
all, hides none more than others; the third sum is that of products there. To estimate, to rescale by what was found
and to estimate again is CoinPress (Biswas, Dong, Kamath and Ullman, NeurIPS 2020, Algorithm 3).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from lit_fedad.contracts import Exchange, ImageSums, Message, MessageSpec, TensorSpec, Update
from lit_fedad.memory.moments import Moments
from lit_fedad.memory.subspace import residual_basis
from lit_fedad.methods.parts.image_moments import ImageMeans, ImageProducts
from lit_fedad.methods.parts.public_frame import public_frame
from lit_fedad.tasks.patches import PatchTask

SOFTNESS = 0.3
"""Variance that is added to each direction's before features are rescaled, as a share of the noise's largest."""

_LEAST = 1e-4
"""The same as a share of the mean variance, for directions in which features do not vary at all."""


class ProjectsFeatures(Protocol):
    """A client whose features are projected.

    Attributes:
        directions: Number of directions k.
        frame: ``centre`` and ``frame`` as last received; empty before.
    """

    directions: int
    frame: Message

    @property
    def task(self) -> PatchTask:
        """Features."""


class HoldsNoised(Protocol):
    """A server that estimates moments of projected features.

    Attributes:
        directions: Number of directions k.
        held_share: Share of variance of the subspace.
        moments: ``centre`` [C], ``frame`` [C, k] and ``rescaling`` [k, k], by which the frame differs from the public
            one; empty before the first sum. After the last the frame is the public one again, beside the ``product``
            [k, k] of features in it, of trace 1, and the directions ``outside`` [k, R] of their subspace.
        subspace: ``centre`` and ``basis``, of features as they are.
    """

    directions: int
    held_share: float
    moments: Message
    subspace: Message

    @property
    def task(self) -> PatchTask:
        """Features."""


@dataclass(frozen=True)
class Projected(Exchange[ProjectsFeatures, HoldsNoised]):
    """An exchange in which clients receive a frame of features; it sends only what noise is added to.

    Attributes:
        name: Name in reports.
    """

    name: str

    def broadcast(self, server: HoldsNoised, client_id: int) -> Message:
        """Returns centre and frame: public at first, then as earlier noised sums have them."""
        held = held_frame(server)
        return {name: held[name].float() for name in ("centre", "frame")}

    def broadcast_spec(self, client: ProjectsFeatures) -> MessageSpec:
        """Declares centre and frame."""
        channels = client.task.num_features
        return {"centre": TensorSpec((channels,)), "frame": TensorSpec((channels, client.directions))}

    def receive(self, client: ProjectsFeatures, message: Message) -> None:
        """Keeps centre and frame for this turn."""
        client.frame = message

    def upload_spec(self, client: ProjectsFeatures) -> MessageSpec:
        """Declares the sums."""
        sums = self.image_sums(client)
        assert sums is not None
        return {name: TensorSpec(shape, torch.float64) for name, shape in sums.form().items()}


@dataclass(frozen=True)
class NoisedMean(Projected):
    """The exchange that moves the centre to the images' mean."""

    def image_sums(self, client: ProjectsFeatures) -> ImageSums:
        """Declares means."""
        return ImageMeans(client.task, client.directions, client.frame)

    def aggregate(self, server: HoldsNoised, updates: Mapping[int, Update]) -> None:
        """Moves the centre, along the directions of the frame: others do not matter."""
        held, mean = held_frame(server), released(updates)["mean"]
        moved = held["centre"] + torch.linalg.pinv(held["frame"]).T @ mean
        server.moments = {**held, "centre": moved}


@dataclass(frozen=True)
class NoisedProducts(Projected):
    """The exchange that finds out in which directions features vary.

    Attributes:
        last: Whether a subspace is fitted, rather than the frame rescaled.
    """

    last: bool = False

    def image_sums(self, client: ProjectsFeatures) -> ImageSums:
        """Declares products."""
        return ImageProducts(client.task, client.directions, client.frame)

    def aggregate(self, server: HoldsNoised, updates: Mapping[int, Update]) -> None:
        """Rescales the frame, or fits the subspace."""
        held, found = server.moments, released(updates)
        if not self.last:
            least = _LEAST * float(found["product"].trace()) / server.directions
            rescaling = whitener(found["product"], least + SOFTNESS * float(found["noise"]))
            server.moments = {**held, "frame": held["frame"] @ rescaling, "rescaling": rescaling}
            return
        # Back from rescaled coordinates to those of the public frame, whose directions are orthogonal.
        back = torch.linalg.inv(held["rescaling"])
        frame, product = held["frame"] @ back, back.T @ found["product"] @ back
        outside = residual_basis(
            Moments(1, torch.zeros_like(product[0]), product), server.held_share
        ).double()
        held = {"centre": held["centre"], "frame": frame, "product": product / product.trace()}
        server.moments = {**held, "outside": outside}
        basis = (frame @ outside).float().contiguous()
        server.subspace = {"centre": held["centre"].float(), "basis": basis}


def whitener(product: Tensor, softness: float) -> Tensor:
    """Computes W such that vectors v of a second moment have one of about the identity as ``v W``.

    Args:
        product: The second moment [k, k], or a multiple.
        softness: What is added to the variance of every direction, in the same units.

    Example:
        >>> whitener(torch.tensor([[3.0, 0.0], [0.0, 0.0]]), 1.0).diag().tolist()
        [0.5, 1.0]
    """
    variances, directions = torch.linalg.eigh(product)
    return (directions / (variances.clamp(min=0) + softness).sqrt()) @ directions.T


def held_frame(server: HoldsNoised) -> Message:
    """Returns ``centre``, ``frame`` and ``rescaling``: public ones before the first sum."""
    if server.moments:
        return server.moments
    centre, frame = public_frame(server.task, server.directions)
    return {"centre": centre, "frame": frame, "rescaling": torch.eye(server.directions, dtype=frame.dtype)}


def released(updates: Mapping[int, Update]) -> Message:
    """Returns what the noised sum of all gives."""
    (update,) = updates.values()
    return update.message


NOISED_SUBSPACE = (
    NoisedMean("mean"),
    NoisedProducts("spread"),
    NoisedProducts("subspace", last=True),
)
"""The exchanges, before round 1."""
