"""The exchanges that find a subspace of normal features under differential privacy: three noised sums over images.

Features are projected on a few directions of public pictures. The first sum gives their mean, the second their products
around it. These give coordinates in which usual features have the same variance in all directions. Noise has the same
variance in all directions too, so that it hides none of them more than others. The third sum gives the products in
these coordinates. To estimate, rescale by the estimate, and estimate again is CoinPress (Biswas, Dong, Kamath and
Ullman, NeurIPS 2020, Algorithm 3).

As in Analyze Gauss (Dwork, Talwar, Thakurta and Zhang, STOC 2014) noise is added to the second moment itself. Every
image adds a vector of length 1: the directions are those of most images, whatever their contrast, and no clipping
length has to be chosen.
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
"""Largest number of drawn scenes, which show the range and directions of features and depend on no client's image."""

_LEAST_SCENES, _PIXELS = 8, MOST_SCENES * 128**2  # fewest scenes, and pixels of all scenes
_BATCH = 16  # scenes per forward pass

CONSTANT = 0.5
"""The entry beside the mean of an image's features; the sum of these entries is the weight of all images."""

SOFTNESS = 0.3
"""Variance that is added to each direction before features are rescaled, as a share of the noise's largest variance."""

_RIDGE = 1e-4
"""Variance that is added as a share of the mean variance, for directions in which features do not vary at all."""

_MIN_LENGTH = 1e-12  # keeps an image without any length at 0

Frame = tuple[Tensor, Tensor]

# Frames by task and number of directions.
_FRAMES: WeakKeyDictionary[PatchTask, dict[int, Frame]] = WeakKeyDictionary()


def public_frame(task: PatchTask, directions: int) -> Frame:
    """Computes the principal directions of the features of drawn scenes, each channel divided by its scale.

    Args:
        task: Features.
        directions: Number k of directions, those of largest variance; at most as many as features have channels.

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
    """Computes the moments of the features of the drawn scenes."""
    height, width = task.size
    scenes = _scenes(max(height, width))[:, :, :height, :width]
    mean, std = (torch.tensor(values)[:, None, None] for values in (task.backbone.mean, task.backbone.std))
    device = next(task.backbone.parameters()).device  # the backbone may be there already, and the task not
    batches = (((part - mean) / std).to(device) for part in scenes.split(_BATCH))
    rows = (task.embed({"image": batch}).flatten(0, 1) for batch in batches)
    return Moments.of(rows, task.num_features)


@lru_cache(maxsize=1)
def _scenes(side: int) -> Tensor:
    """Draws scenes [n, 3, side, side] in [0, 1], fewer if large, on the CPU so that all machines draw the same."""
    count = min(MOST_SCENES, max(_LEAST_SCENES, _PIXELS // side**2))
    return Scenes(size=side, scenes=count, textures=min(count, 48)).views(0)[0]


class ProjectedSums(ABC):
    """Sums over images of functions of their features ``(f - c) A``.

    Args:
        client: The client, for its features and its number k of directions. Its attribute ``frame`` is the server's
            message: ``centre`` c [C] and ``frame`` A [C, k].
    """

    def __init__(self, client: MomentsClient) -> None:
        self.task, self.directions, self.frame = client.task, client.directions, client.frame

    @abstractmethod
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Declares the sums."""

    @abstractmethod
    def from_sums(self, server: Any, sums: Mapping[str, Tensor], noise: float) -> Message:
        """Computes estimates from the noised sums; see `ImageSums.from_sums`."""

    @staticmethod
    @abstractmethod
    def merge(server: Any, results: Message) -> None:
        """Updates the server by the results of `from_sums`."""

    @abstractmethod
    def _parts(self, projected: Tensor) -> dict[str, Tensor]:
        """Computes what each image adds, before scaling to length 1, from its projected patches [B, P, k]."""

    @torch.no_grad()
    def per_image(self, loader: Iterable[Any]) -> Iterator[dict[str, Tensor]]:
        """Yields what the images of each batch add, of length 1; an image without any length adds nothing."""
        centre, frame = (self.frame[name].to(self.task.mean) for name in ("centre", "frame"))

        def added(batch: Mapping[str, Any]) -> dict[str, Tensor]:
            parts = self._parts((self.task.embed(batch).float() - centre) @ frame)
            return {name: part.double().cpu() for name, part in parts.items()}

        for parts in map_batches(self.task, loader, added):
            squares = torch.stack([part.flatten(1).square().sum(1) for part in parts.values()]).sum(0)
            lengths = squares.sqrt().clamp(min=_MIN_LENGTH)
            yield {name: part / lengths.reshape(-1, *[1] * (part.ndim - 1)) for name, part in parts.items()}


def weight_of(sums: Mapping[str, Tensor], noise: float) -> float:
    """Returns the weight of all images: the sum over images of `CONSTANT` divided by the image's length.

    Raises:
        HiddenByNoiseError: If it lies within three deviations of the noise.
    """
    weight = float(sums["weight"])
    if weight <= 3 * noise:
        raise HiddenByNoiseError
    return weight


class ImageMeans(ProjectedSums):
    """The sums ``weight`` [1] and ``mean`` [k] of images' ``(1/2, mean of projected features)``, scaled to length 1."""

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
        """Moves the centre to the mean, along the directions of the frame: other directions are projected away."""
        moments = current_frame(server)
        centre = moments["centre"] + torch.linalg.pinv(moments["frame"]).T @ results["mean"]
        server.moments = {**moments, "centre": centre}


class ImageProducts(ProjectedSums):
    """The sum ``product`` [k (k + 1) / 2]: an image adds the mean of ``g g^T`` over its patches g, at Frobenius norm 1.

    It is packed as an upper triangle, by the factors of `triangle`.
    """

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Declares the sum."""
        return {"product": (self.directions * (self.directions + 1) // 2,)}

    def _parts(self, projected: Tensor) -> dict[str, Tensor]:
        rows, columns, lengths = triangle(self.directions)
        square = projected.mT @ projected / projected.shape[1]
        return {"product": square[:, rows, columns] * lengths.to(projected)}

    def from_sums(self, server: Any, sums: Mapping[str, Tensor], noise: float) -> Message:
        """Computes ``product`` [k, k], without negative variances, and ``noise``, the largest variance of noise alone.

        Raises:
            HiddenByNoiseError: If noise alone would have a variance as large as the largest.
        """
        product = from_triangle(sums["product"], self.directions)
        # Entries off the diagonal have half the variance of those on it: the largest eigenvalue of such noise is
        # 2 sqrt(k / 2) deviations (Wigner).
        noise_variance = noise * math.sqrt(2 * self.directions)
        if not torch.linalg.eigvalsh(product)[-1] > noise_variance:
            raise HiddenByNoiseError
        return {
            "product": without_negative(product),
            "noise": torch.tensor(noise_variance, dtype=product.dtype),
        }

    @staticmethod
    def merge(server: MomentsServer, results: Message) -> None:
        """Rescales the frame, so that features have about the same variance in all of its directions."""
        moments, rescaling = server.moments, whitener(results, _RIDGE)
        server.moments = {**moments, "frame": moments["frame"] @ rescaling, "rescaling": rescaling}


class LastProducts(ImageProducts):
    """The sum of products in rescaled coordinates, to which the subspace is fitted."""

    @staticmethod
    def merge(server: MomentsServer, results: Message) -> None:
        """Fits the subspace."""
        state = server.moments
        # Rescaled coordinates are turned back to those of the public frame, whose directions are orthogonal.
        inverse = torch.linalg.inv(state["rescaling"])
        frame, product = state["frame"] @ inverse, inverse.T @ results["product"] @ inverse
        moments = Moments(1, torch.zeros_like(product[0]), product)
        outside = residual_basis(moments, server.noised_share).double()
        state = {"centre": state["centre"], "frame": frame, "product": product / product.trace()}
        server.moments = {**state, "outside": outside}
        basis = (frame @ outside).float().contiguous()
        # All products share one subspace, since noise grows with the number of sums.
        server.subspace = {"centre": state["centre"].float()[None], "basis": basis[None]}


def triangle(channels: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns rows, columns and factors [C (C + 1) / 2]; times the factors an upper triangle is as long as its matrix.

    The factor of entries off the diagonal is the root of 2, since each stands for two entries of the matrix.
    """
    rows, columns = torch.triu_indices(channels, channels)
    return rows, columns, torch.where(rows == columns, 1.0, math.sqrt(2))


def from_triangle(entries: Tensor, channels: int) -> Tensor:
    """Computes a symmetric matrix [C, C] from its upper triangle, which was multiplied by `triangle`'s factors."""
    product = symmetric(entries, channels) / math.sqrt(2)
    return product + product.diag().diag() * (math.sqrt(2) - 1)


def without_negative(covariance: Tensor) -> Tensor:
    """Computes the nearest matrix without negative variances, which noise can cause.

    Args:
        covariance: A symmetric matrix [C, C].

    Example:
        >>> without_negative(torch.tensor([[2.0, 0.0], [0.0, -1.0]])).tolist()
        [[2.0, 0.0], [0.0, 0.0]]
    """
    variances, directions = torch.linalg.eigh(covariance)
    return (directions * variances.clamp(min=0)) @ directions.T


class Projected(Exchange[MomentsClient, MomentsServer]):
    """An exchange in which clients receive a frame of features, and send sums to which noise is added.

    The server's ``moments`` are empty before the first sum. Then they are ``centre`` [C], ``frame`` [C, k] and
    ``rescaling`` [k, k], by which the frame differs from the public one. After the last sum the frame is the public one
    again. Beside it are then ``product`` [k, k], the second moment of features in it, scaled to trace 1, and
    ``outside`` [k, R], the directions outside their subspace.

    Args:
        name: Name in reports.
        kind: Class of the sums that images add to.
    """

    discloses = (summed("mean and products of the images' features, each of bounded length"),)

    def __init__(self, name: str, kind: type[ProjectedSums]) -> None:
        self.name, self.kind, self.sums = name, kind, Sums(by_image=kind)

    def broadcast(self, server: MomentsServer, client_id: int) -> Message:
        """Returns centre and frame: at first the public ones, later those that earlier noised sums have changed."""
        frame = current_frame(server)
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
        """Updates the server by the estimates from the noised sum of all clients."""
        (update,) = updates.values()
        self.kind.merge(server, update.message)


def whitener(results: Message, ridge: float) -> Tensor:
    """Computes W [k, k] such that the vectors ``v W`` have a second moment of about the identity.

    Args:
        results: The second moment ``product`` [k, k] of v, or a multiple of it, and ``noise``, the largest variance of
            the noise in it.
        ridge: Share of the mean variance that is added to the variance of each direction, beside `SOFTNESS` of the
            noise.
    """
    product = results["product"]
    added = ridge * float(product.trace()) / len(product) + SOFTNESS * float(results["noise"])
    variances, directions = torch.linalg.eigh(product)
    return (directions / (variances.clamp(min=0) + added).sqrt()) @ directions.T


def current_frame(server: MomentsServer) -> Message:
    """Returns the server's ``centre``, ``frame`` and ``rescaling``; before the first sum the public ones."""
    if server.moments:
        return server.moments
    centre, frame = public_frame(server.task, server.directions)
    return {"centre": centre, "frame": frame, "rescaling": torch.eye(server.directions, dtype=frame.dtype)}


NOISED_FRAME = (Projected("mean", ImageMeans), Projected("spread", ImageProducts))
"""The exchanges that move the frame to the mean of all images, and rescale it."""

NOISED_SUBSPACE = (*NOISED_FRAME, Projected("subspace", LastProducts))
"""The exchanges before round 1 that find a noised subspace."""
