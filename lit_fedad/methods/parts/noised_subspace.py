"""The exchanges that find a subspace of normal features under differential privacy: three noised sums over images.

Features are projected on a few directions of public pictures. The first sum is their mean; the second their products
around it; these give coordinates in which usual features vary alike in all directions, so that noise, which is alike in
all, hides none more than others; the third sum is that of products there. To estimate, to rescale by what was found
and to estimate again is CoinPress (Biswas, Dong, Kamath and Ullman, NeurIPS 2020, Algorithm 3).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from lit_fedad.contracts import Exchange, Message, MessageSpec, Sums, TensorSpec, Update
from lit_fedad.contracts.disclosure import summed
from lit_fedad.contracts.task import channel_scale
from lit_fedad.memory.moments import Moments
from lit_fedad.memory.subspace import residual_basis
from lit_fedad.methods.parts.image_moments import ImageMeans, ImageProducts
from lit_fedad.pretraining.scenes import Scenes
from lit_fedad.tasks.patches import PatchTask

MOST_SCENES = 128
"""Scenes that show in which range and directions features lie: they have no relation to any image of a client."""

_LEAST_SCENES, _PIXELS = 8, MOST_SCENES * 128**2
_BATCH = 16

Frame = tuple[Tensor, Tensor]

_FRAMES: WeakKeyDictionary[PatchTask, dict[int, Frame]] = WeakKeyDictionary()


def public_frame(task: PatchTask, directions: int) -> Frame:
    """Computes the principal directions of the features of drawn scenes, each channel divided by its scale.

    Args:
        task: Features.
        directions: Number of directions k, those of most variance; at most as many as features have channels.

    Returns:
        The centre c [C] and directions A [C, k], float64: ``(f - c) A`` has a mean square length of 1 on the scenes.
    """
    found = _FRAMES.setdefault(task, {})
    if directions not in found:
        moments = _moments(task)
        scale = channel_scale(moments.variance, 1.0)
        variances, axes = torch.linalg.eigh(moments.scaled(scale).covariance)
        held = variances.flip(0)[:directions].clamp(min=0).sum().clamp(min=1e-12).sqrt()
        found[directions] = moments.mean, axes.flip(1)[:, :directions] / scale[:, None] / held
    return found[directions]


@torch.no_grad()
def _moments(task: PatchTask) -> Moments:
    height, width = task.size
    scenes = _scenes(max(height, width))[:, :, :height, :width]
    mean, std = (torch.tensor(values)[:, None, None] for values in (task.backbone.mean, task.backbone.std))
    batches = (((part - mean) / std).to(task.mean.device) for part in scenes.split(_BATCH))
    rows = (task.embed({"image": batch}).flatten(0, 1) for batch in batches)
    return Moments.of(rows, task.num_features)


@lru_cache(maxsize=1)
def _scenes(side: int) -> Tensor:
    """Draws scenes [n, 3, side, side] in [0, 1], fewer of large ones, on the CPU: alike everywhere."""
    count = min(MOST_SCENES, max(_LEAST_SCENES, _PIXELS // side**2))
    return Scenes(size=side, scenes=count, textures=min(count, 48)).views(0)[0]


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
        """Keeps centre and frame for this exchange."""
        client.frame = message

    discloses = (summed("mean and products of the images' features, each of bounded length"),)

    def upload_spec(self, client: ProjectsFeatures) -> MessageSpec:
        """Declares the sums."""
        assert self.sums is not None
        assert self.sums.by_image is not None
        shapes = self.sums.by_image(client).shapes()
        return {name: TensorSpec(shape, torch.float64) for name, shape in shapes.items()}


@dataclass(frozen=True)
class NoisedMean(Projected):
    """The exchange that moves the centre to the images' mean."""

    sums = Sums(by_image=lambda client: ImageMeans(client.task, client.directions, client.frame))

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

    sums = Sums(by_image=lambda client: ImageProducts(client.task, client.directions, client.frame))

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
        # Noise grows with the number of sums: one subspace is for all products.
        server.subspace = {"centre": held["centre"].float()[None], "basis": basis[None]}


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
