"""The exchanges that find a subspace of normal features under differential privacy: three noised sums over images.

Features are projected on a few directions of public pictures. The first sum is their mean; the second their products
around it; these give coordinates in which usual features vary alike in all directions, so that noise, which is alike in
all, hides none more than others; the third sum is that of products there. To estimate, to rescale by what was found
and to estimate again is CoinPress (Biswas, Dong, Kamath and Ullman, NeurIPS 2020, Algorithm 3).

As in Analyze Gauss (Dwork, Talwar, Thakurta and Zhang, STOC 2014) noise is added to the second moment itself. Every
image counts alike: directions are those of most images, whatever their contrast, and there is no length to choose.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from lit_fedad.contracts import Exchange, Message, MessageSpec, Sums, TensorSpec, Update
from lit_fedad.contracts.compute import map_batches
from lit_fedad.contracts.disclosure import summed
from lit_fedad.contracts.sums import HiddenByNoiseError
from lit_fedad.contracts.task import channel_scale
from lit_fedad.memory.moments import Moments, symmetric
from lit_fedad.memory.subspace import residual_basis
from lit_fedad.methods.parts.pooled_moments import MomentsClient, MomentsServer
from lit_fedad.models.scenes import Scenes
from lit_fedad.tasks.patches import PatchTask

MOST_SCENES = 128
"""Scenes that show in which range and directions features lie: they have no relation to any image of a client."""

_LEAST_SCENES, _PIXELS = 8, MOST_SCENES * 128**2
_BATCH = 16

CONSTANT = 0.5
"""The entry beside the mean of an image's features, from which its weight follows."""

SOFTNESS = 0.3
"""Variance that is added to each direction's before features are rescaled, as a share of the noise's largest."""

_LEAST = 1e-4
"""The same as a share of the mean variance, for directions in which features do not vary at all."""

_SHORTEST = 1e-12

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
    frames = _FRAMES.setdefault(task, {})
    if directions not in frames:
        moments = _moments(task)
        scale = channel_scale(moments.variance, 1.0)
        variances, axes = torch.linalg.eigh(moments.scaled(scale).covariance)
        length = variances.flip(0)[:directions].clamp(min=0).sum().clamp(min=1e-12).sqrt()
        frames[directions] = moments.mean, axes.flip(1)[:, :directions] / scale[:, None] / length
    return frames[directions]


@torch.no_grad()
def _moments(task: PatchTask) -> Moments:
    height, width = task.size
    scenes = _scenes(max(height, width))[:, :, :height, :width]
    mean, std = (torch.tensor(values)[:, None, None] for values in (task.backbone.mean, task.backbone.std))
    device = next(task.backbone.parameters()).device  # which computed features before the task came there
    batches = (((part - mean) / std).to(device) for part in scenes.split(_BATCH))
    rows = (task.embed({"image": batch}).flatten(0, 1) for batch in batches)
    return Moments.of(rows, task.num_features)


@lru_cache(maxsize=1)
def _scenes(side: int) -> Tensor:
    """Draws scenes [n, 3, side, side] in [0, 1], fewer of large ones, on the CPU: alike everywhere."""
    count = min(MOST_SCENES, max(_LEAST_SCENES, _PIXELS // side**2))
    return Scenes(size=side, scenes=count, textures=min(count, 48)).views(0)[0]


class ProjectedSums(ABC):
    """Sums over images of functions of their features ``(f - c) A``.

    Args:
        client: Its features, the number of directions k, and as its ``frame`` what the server has sent: ``centre`` c
            [C] and ``frame`` A [C, k].
    """

    def __init__(self, client: MomentsClient) -> None:
        self.task, self.directions, self.frame = client.task, client.directions, client.frame

    @abstractmethod
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Declares the sums."""

    @abstractmethod
    def from_sums(self, server: Any, sums: Mapping[str, Tensor], noise: float) -> Message:
        """Computes what follows from the sums."""

    @staticmethod
    @abstractmethod
    def merge(server: Any, results: Message) -> None:
        """Stores on the server what `from_sums` computed."""

    @abstractmethod
    def _parts(self, projected: Tensor) -> dict[str, Tensor]:
        """Computes what images add, before they are brought to length 1, of projected patches [B, P, k]."""

    @torch.no_grad()
    def per_image(self, loader: Iterable[Any]) -> Iterator[dict[str, Tensor]]:
        """Yields what the images of each batch add, of length 1; an image without any length adds nothing."""
        centre, frame = (self.frame[name].to(self.task.mean) for name in ("centre", "frame"))

        def added(batch: Mapping[str, Any]) -> dict[str, Tensor]:
            parts = self._parts((self.task.embed(batch).float() - centre) @ frame)
            return {name: part.double().cpu() for name, part in parts.items()}

        for parts in map_batches(self.task, loader, added):
            squares = torch.stack([part.flatten(1).square().sum(1) for part in parts.values()]).sum(0)
            lengths = squares.sqrt().clamp(min=_SHORTEST)
            yield {name: part / lengths.reshape(-1, *[1] * (part.ndim - 1)) for name, part in parts.items()}


def weight_of(sums: Mapping[str, Tensor], noise: float) -> float:
    """Returns the weight of all images: the sum of `CONSTANT` over the length of each.

    Raises:
        HiddenByNoiseError: If it lies within three deviations of the noise.
    """
    weight = float(sums["weight"])
    if weight <= 3 * noise:
        raise HiddenByNoiseError
    return weight


class ImageMeans(ProjectedSums):
    """The sums ``weight`` [1] and ``mean`` [k]: ``h = (1/2, mean of projected features)`` of images, at length 1."""

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Declares the sums."""
        return {"weight": (1,), "mean": (self.directions,)}

    def _parts(self, projected: Tensor) -> dict[str, Tensor]:
        return {"weight": projected.new_full((len(projected), 1), CONSTANT), "mean": projected.mean(1)}

    def from_sums(self, server: Any, sums: Mapping[str, Tensor], noise: float) -> Message:
        """Computes the ``mean`` [k] of projected features.

        Raises:
            HiddenByNoiseError: If the weight of all images lies within three deviations of the noise.
        """
        return {"mean": CONSTANT * sums["mean"] / weight_of(sums, noise)}

    @staticmethod
    def merge(server: MomentsServer, results: Message) -> None:
        """Moves the centre to the mean, along the directions of the frame: others do not matter."""
        moments = held_frame(server)
        moved = moments["centre"] + torch.linalg.pinv(moments["frame"]).T @ results["mean"]
        server.moments = {**moments, "centre": moved}


class ImageProducts(ProjectedSums):
    """The sum ``product`` [k (k + 1) / 2]: the mean of ``g g^T`` over an image's patches g, over its Frobenius norm."""

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Declares the sum."""
        return {"product": (self.directions * (self.directions + 1) // 2,)}

    def _parts(self, projected: Tensor) -> dict[str, Tensor]:
        rows, columns, lengths = triangle(self.directions)
        square = projected.mT @ projected / projected.shape[1]
        return {"product": square[:, rows, columns] * lengths.to(projected)}

    def from_sums(self, server: Any, sums: Mapping[str, Tensor], noise: float) -> Message:
        """Computes ``product`` [k, k], without negative variances, and ``noise``, the length of noise alone.

        Raises:
            HiddenByNoiseError: If noise alone would have a variance as large as the largest.
        """
        product = from_triangle(sums["product"], self.directions)
        # Entries off the diagonal have half the variance of those on it: the largest eigenvalue of such noise is
        # 2 sqrt(k / 2) deviations (Wigner).
        spread = noise * math.sqrt(2 * self.directions)
        if not torch.linalg.eigvalsh(product)[-1] > spread:
            raise HiddenByNoiseError
        return {"product": without_negative(product), "noise": torch.tensor(spread, dtype=product.dtype)}

    @staticmethod
    def merge(server: MomentsServer, results: Message) -> None:
        """Rescales the frame, so that features vary alike in all of its directions."""
        moments, rescaling = server.moments, whitener(results, _LEAST)
        server.moments = {**moments, "frame": moments["frame"] @ rescaling, "rescaling": rescaling}


class LastProducts(ImageProducts):
    """The same sum in rescaled coordinates, to which the subspace is fitted."""

    @staticmethod
    def merge(server: MomentsServer, results: Message) -> None:
        """Fits the subspace."""
        state = server.moments
        # Back from rescaled coordinates to those of the public frame, whose directions are orthogonal.
        back = torch.linalg.inv(state["rescaling"])
        frame, product = state["frame"] @ back, back.T @ results["product"] @ back
        moments = Moments(1, torch.zeros_like(product[0]), product)
        outside = residual_basis(moments, server.noised_share).double()
        state = {"centre": state["centre"], "frame": frame, "product": product / product.trace()}
        server.moments = {**state, "outside": outside}
        basis = (frame @ outside).float().contiguous()
        # Noise grows with the number of sums: one subspace is for all products.
        server.subspace = {"centre": state["centre"].float()[None], "basis": basis[None]}


def triangle(channels: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns rows, columns and factors [C (C + 1) / 2] by which an upper triangle is as long as its matrix.

    Entries off the diagonal stand for two, and are taken times the root of 2.
    """
    rows, columns = torch.triu_indices(channels, channels)
    return rows, columns, torch.where(rows == columns, 1.0, math.sqrt(2))


def from_triangle(entries: Tensor, channels: int) -> Tensor:
    """Computes the symmetric matrix [C, C] of an upper triangle times the factors of `triangle`."""
    product = symmetric(entries, channels) / math.sqrt(2)
    return product + product.diag().diag() * (math.sqrt(2) - 1)


def without_negative(covariance: Tensor) -> Tensor:
    """Computes the nearest matrix without a negative variance, which noise may have brought.

    Args:
        covariance: A symmetric matrix [C, C].

    Example:
        >>> without_negative(torch.tensor([[2.0, 0.0], [0.0, -1.0]])).tolist()
        [[2.0, 0.0], [0.0, 0.0]]
    """
    variances, directions = torch.linalg.eigh(covariance)
    return (directions * variances.clamp(min=0)) @ directions.T


class Projected(Exchange[MomentsClient, MomentsServer]):
    """An exchange in which clients receive a frame of features; it sends only what noise is added to.

    The server's ``moments`` are ``centre`` [C], ``frame`` [C, k] and ``rescaling`` [k, k], by which the frame differs
    from the public one; empty before the first sum. After the last the frame is the public one again, beside the
    ``product`` [k, k] of features in it, of trace 1, and the directions ``outside`` [k, R] of their subspace.

    Args:
        name: Name in reports.
        kind: What images add, and what follows from it.
    """

    discloses = (summed("mean and products of the images' features, each of bounded length"),)

    def __init__(self, name: str, kind: type[ProjectedSums]) -> None:
        self.name, self.kind, self.sums = name, kind, Sums(by_image=kind)

    def broadcast(self, server: MomentsServer, client_id: int) -> Message:
        """Returns centre and frame: public at first, then as earlier noised sums have them."""
        frame = held_frame(server)
        return {name: frame[name].float() for name in ("centre", "frame")}

    def broadcast_spec(self, client: MomentsClient) -> MessageSpec:
        """Declares centre and frame."""
        channels = client.task.num_features
        return {"centre": TensorSpec((channels,)), "frame": TensorSpec((channels, client.directions))}

    def receive(self, client: MomentsClient, message: Message) -> None:
        """Keeps centre and frame for this exchange."""
        client.frame = message

    def upload_spec(self, client: MomentsClient) -> MessageSpec:
        """Declares the sums."""
        shapes = self.kind(client).shapes()
        return {name: TensorSpec(shape, torch.float64) for name, shape in shapes.items()}

    def aggregate(self, server: MomentsServer, updates: Mapping[int, Update]) -> None:
        """Merges what the noised sum of all gives."""
        (update,) = updates.values()
        self.kind.merge(server, update.message)


def whitener(results: Message, least: float) -> Tensor:
    """Computes W such that vectors v of a second moment have one of about the identity as ``v W``.

    Args:
        results: The second moment ``product`` [k, k], or a multiple, and the length ``noise`` of noise in it.
        least: Share of the mean variance that is added to each direction's, beside `SOFTNESS` of the noise.
    """
    product = results["product"]
    softness = least * float(product.trace()) / len(product) + SOFTNESS * float(results["noise"])
    variances, directions = torch.linalg.eigh(product)
    return (directions / (variances.clamp(min=0) + softness).sqrt()) @ directions.T


def held_frame(server: MomentsServer) -> Message:
    """Returns ``centre``, ``frame`` and ``rescaling``: public ones before the first sum."""
    if server.moments:
        return server.moments
    centre, frame = public_frame(server.task, server.directions)
    return {"centre": centre, "frame": frame, "rescaling": torch.eye(server.directions, dtype=frame.dtype)}


NOISED_FRAME = (Projected("mean", ImageMeans), Projected("spread", ImageProducts))
"""The exchanges that move the frame to the mean of all images, and rescale it."""

NOISED_SUBSPACE = (*NOISED_FRAME, Projected("subspace", LastProducts))
"""The exchanges, before round 1."""
