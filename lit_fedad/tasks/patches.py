"""Frozen patch features of a backbone, and anomaly maps: the base of all detectors on patches."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from scipy.ndimage import gaussian_filter1d
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lit_fedad.contracts import Context, StandardisedTask
from lit_fedad.contracts.compute import full_precision, map_batches
from lit_fedad.contracts.task import channel_scale
from lit_fedad.core.bounds import at_least, pair, within
from lit_fedad.core.errors import UserError, not_there
from lit_fedad.memory.moments import Moments, Tally, symmetric, upper_triangle
from lit_fedad.memory.subspace import statistics_of
from lit_fedad.models.large_images import Backbone, at_scales

WIDEST_BLUR = 8192
"""Largest standard deviation of a blur, in pixels: the largest side of an image."""


class AnomalyMap(nn.Module):
    """Bilinear upsampling followed by a Gaussian blur, as two small matrix products.

    Both steps are linear and separable: along each side they are one matrix A [pixels, patches], and the map of scores
    S is A_rows S A_columns^T.

    Args:
        grid: Number of patches along a side, or rows and columns of patches.
        size: Side of the image in pixels, or its height and width.
        sigma: Standard deviation of the blur, in pixels of the image; 0 for none.
    """

    rows: Tensor
    columns: Tensor

    def __init__(self, grid: int | Sequence[int], size: int | Sequence[int], sigma: float = 4.0) -> None:
        super().__init__()
        within("task", 0, WIDEST_BLUR, sigma=sigma)
        (rows, columns), (height, width) = pair("task.grid", grid), pair("task.image_size", size)
        self.register_buffer("rows", _side(rows, height, sigma), persistent=False)
        self.register_buffer("columns", _side(columns, width, sigma), persistent=False)

    def forward(self, scores: Tensor) -> Tensor:
        """Interpolates and blurs patch scores [B, rows, columns] to anomaly maps [B, H, W]."""
        with full_precision(scores):  # in half precision, images near a threshold would have equal scores
            return self.rows @ scores.float() @ self.columns.T


def _side(patches: int, pixels: int, sigma: float) -> Tensor:
    """Computes the matrix [pixels, patches] that interpolates and blurs along one side."""
    identity = torch.eye(patches)[:, None]
    side = F.interpolate(identity, size=pixels, mode="linear", align_corners=False)[:, 0].T.numpy()
    if sigma > 0:
        side = gaussian_filter1d(side.astype(np.float64), sigma, axis=0, mode="reflect")
    return torch.from_numpy(np.ascontiguousarray(side, dtype=np.float32))


MOST_PATCHES = 1024
"""Largest number of patches along a side of an image: more than any use needs, and few enough for the memory."""


COARSE = 16
"""Number of patches along the reference grid, for which the smoothing of image scores is configured."""


CHANNEL_STATISTICS = ("mean", "scale", "whitening")
"""Buffers of a `PatchTask` by which features are standardised; methods with a server pool them over clients."""


class PatchTask(StandardisedTask):
    """A task on the patch features of a frozen backbone.

    Features of several layers are resized to one grid and concatenated (FedDyMem Eq. 8), and optionally standardised
    per channel. Scores of patches are drawn as smoothed maps.

    Args:
        backbone: Frozen feature extractor.
        grid: Number of patches along the side of a tile or, without tiles, along the image's short side. The grid of an
            image, H0 x W0, has as many rows and columns of such patches as fit into the image.
        image_size: Side of the images in pixels, or their height and width.
        standardise: Whether channels are standardised over the training patches.
        shrinkage: See `channel_scale`.
        average_pool: Which layers are averaged over 3x3 neighbouring positions: True for all, as in CFA and PatchCore;
            ``"last"`` for the last, which keeps small defects sharp in maps; False for none.
        sigma: Standard deviation of the Gaussian smoothing of the map, in pixels.
        rim: Number of patches at each side of the grid that image scores leave out: features there depend on the
            padding of the backbone's input.
        top: Share of a map's pixels, the highest, whose mean is the image score; 0 for the maximum.
        tile: Side of the tiles that the backbone sees one by one, in pixels; None if it sees whole images.
        image_sigma: Standard deviation of the smoothing for image scores on a grid of `COARSE` patches, as a share of
            the side of a tile or the short side of the image. It grows in proportion to the grid: the finer the grid,
            the less of a defect a patch sees. None for the smoothing of the map.
        scales: Number of image sizes (whole, half, quarter and so on) over which features are averaged, where they are
            averaged in all layers; None for the sizes of `at_scales`.

    Attributes:
        whiten: Share of the mean variance that is added to the variance of every direction, before standardised
            features are whitened; None for no whitening.

    Raises:
        UserError: If a number is out of range.
    """

    local_buffers: tuple[str, ...] = CHANNEL_STATISTICS
    products: tuple[str, ...] = ()
    whiten: float | None = None

    mean: Tensor
    scale: Tensor
    whitening: Tensor
    places: Tensor

    def __init__(
        self,
        backbone: Backbone,
        grid: int = 56,
        image_size: int | Sequence[int] = 224,
        standardise: bool = True,
        shrinkage: float = 1.0,
        average_pool: bool | str = True,
        sigma: float = 4.0,
        rim: int = 0,
        top: float = 0.0,
        tile: int | None = None,
        image_sigma: float | None = None,
        scales: int | None = 1,
    ) -> None:
        super().__init__()
        at_least("task", 1, grid=grid)
        self.size = size = pair("task.image_size", image_size)
        at_least("task", 0, rim=rim, shrinkage=shrinkage)
        within("task", 0, 1, top=top, image_sigma=image_sigma)
        if average_pool not in (True, False, "last"):
            raise UserError(f"task.average_pool={average_pool} must be true, false or 'last'")
        self.grid = rows, columns = _grid(size, grid, tile)
        if 2 * rim >= min(self.grid):
            raise UserError(
                f"task.rim={rim} leaves nothing of a grid of {min(self.grid)} patches a side; give task.rim=0, or a"
                " larger grid"
            )
        self.backbone = at_scales(backbone, scales, self.size)
        self.num_features = self.channels = sum(backbone.channels)
        self.vectors_per_image = rows * columns
        self.standardise, self.shrinkage, self.average_pool = standardise, shrinkage, average_pool
        self.rim, self.top = rim, top
        self.draw_map = AnomalyMap(self.grid, size, sigma)
        self.draw_score = self.draw_map
        if image_sigma is not None:
            blur = image_sigma * (tile or min(size)) * grid / COARSE
            self.draw_score = AnomalyMap(self.grid, size, blur)
        # Values that are not yet set are NaN.
        self.register_buffer("mean", torch.full((self.channels,), torch.nan if standardise else 0.0))
        self.register_buffer("scale", torch.ones(self.channels))
        self.register_buffer("whitening", torch.empty(0, 0))
        sides = [(torch.arange(patches) + 0.5) / patches * 2 - 1 for patches in self.grid]
        y, x = torch.meshgrid(*sides, indexing="ij")
        self.register_buffer("places", torch.stack([x.flatten(), y.flatten()], dim=1), persistent=False)

    def with_pyramid(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Adds the backbone's features of each layer to a batch of images, so that they are computed only once."""
        if "image" not in batch or "pyramid" in batch:
            return {**batch}
        with full_precision(self.mean):  # cached features are computed in full precision too
            return {**batch, "pyramid": self.backbone(batch["image"])}

    def embed(self, batch: Mapping[str, Any], average_pool: bool | str | None = None) -> Tensor:
        """Computes frozen features on the grid (FedDyMem Eq. 8).

        Args:
            batch: With ``pyramid`` (cached features of each layer) or ``image`` [B, 3, H, W].
            average_pool: Layers that are averaged over neighbouring positions; None for the setting of the task.

        Returns:
            Patch features [B, H0 * W0, C], not standardised.
        """
        pyramid = self.with_pyramid(batch)["pyramid"]
        pooled = self.average_pool if average_pool is None else average_pool
        count, layers = len(self.backbone.channels), []
        for index in range(count):
            average = pooled is True or (pooled == "last" and index == count - 1)
            # Smaller sizes of the image show diffuse defects better, but blur maps: they are used with the pooling of
            # all layers only. The pyramid has all layers of the whole image first, then those of the next size.
            sizes = pyramid[index::count] if pooled is True else pyramid[index : index + 1]
            maps = [self._on_grid(layer, average) for layer in sizes]
            layers.append(maps[0] if len(maps) == 1 else torch.stack(maps).mean(0))
        return torch.cat(layers, dim=1).transpose(1, 2)

    def _on_grid(self, layer: Tensor, average: bool) -> Tensor:
        """Resizes a layer's features [B, C_l, H_l, W_l] to the grid [B, C_l, H0 * W0]."""
        # With channels last both steps are several times faster, and give the same numbers.
        layer = layer.to(memory_format=torch.channels_last)
        if average:
            layer = F.avg_pool2d(layer, 3, stride=1, padding=1)
        if tuple(layer.shape[2:]) != self.grid:
            layer = F.interpolate(layer, size=self.grid, mode="bilinear", align_corners=False)
        return layer.flatten(2)

    def standardised(self, patches: Tensor) -> Tensor:
        """Standardises and whitens patch features [..., C] by the loaded statistics."""
        patches = (patches - self.mean) / self.scale
        with full_precision(patches):
            return patches if self.whiten is None else patches @ self.whitening

    @property
    def moment_sets(self) -> int:
        """Number of sets of moments that `moments` computes."""
        raise NotImplementedError

    def moments(self, loader: DataLoader) -> list[Moments]:
        """Computes the moments of local features that standardisation and subspace depend on."""
        raise not_there(self, "moments")

    @torch.no_grad()
    def channel_moments(self, loader: DataLoader) -> tuple[int, Tensor, Tensor]:
        """Computes number, mean [C] and variance [C] of all local frozen patch features, in one pass."""
        count = 0
        shift = total = square = torch.zeros(self.channels, dtype=torch.float64)
        for features in map_batches(self, loader, self.embed):
            patches = features.flatten(0, 1).double().cpu()
            # Sums around the first batch's mean keep the variance exact for channels far from zero.
            shift = patches.mean(0) if count == 0 else shift
            count += len(patches)
            total, square = total + (patches - shift).sum(0), square + (patches - shift).square().sum(0)
        mean = total / count
        return count, (shift + mean).float(), (square / count - mean**2).clamp(min=0).float()

    @property
    def kinds(self) -> int:
        """Number of kinds of images with their own moments: each named product, and all other images together."""
        return len(self.products) + 1 if len(self.products) > 1 else 1

    def nearest_kind(self, batch: Mapping[str, Any]) -> Tensor | None:
        """Computes the kind that each image looks like [B]; None if the task has one model of all images."""
        return None

    @torch.no_grad()
    def second_moments(
        self, loader: DataLoader, folds: int = 1, average_pool: bool | None = None, kinds: int = 1
    ) -> list[Moments]:
        """Computes the moments of all local frozen patch features.

        Args:
            loader: Local batches; with several kinds, their ``product`` is the kind of each image.
            folds: Number of sets among which the images of a kind are dealt in turn.
            average_pool: See `embed`.
            kinds: Number of kinds, each with its own sets; sets are returned kind by kind.
        """
        tallies = [[Tally(self.channels) for _ in range(folds)] for _ in range(kinds)]
        vectors_seen = [0] * kinds

        def add(batch: Mapping[str, Any]) -> None:
            features = self.embed(batch, average_pool=average_pool)
            for kind in range(kinds):
                chosen = features if kinds == 1 else features[batch["product"] == kind]
                for fold in range(folds):
                    part = chosen[(fold - vectors_seen[kind]) % folds :: folds]
                    tallies[kind][fold].add(part.flatten(0, 1))
                vectors_seen[kind] += len(chosen)

        if folds:
            for _ in map_batches(self, loader, add):
                pass
        return [tally.moments() for chosen in tallies for tally in chosen]

    def load_statistics(self, mean: Tensor, scale: Tensor, whitening: Tensor | None = None) -> None:
        """Loads mean and scale [C] of channels, and the upper triangle of the matrix that whitens [C (C + 1) / 2]."""
        self.mean, self.scale = mean.to(self.mean), scale.to(self.scale)
        if whitening is not None:
            self.whitening = symmetric(whitening, self.channels).to(self.whitening)

    def statistics_of(self, moments: Moments) -> dict[str, Tensor]:
        """Computes the arguments of `load_statistics` from the moments of frozen features."""
        return statistics_of(moments, self.standardise, self.shrinkage, self.whiten)

    def standardise_locally(self, loader: DataLoader) -> None:
        """Computes and loads statistics of local features, unless some were loaded."""
        if self.mean.isnan().any():
            _, mean, variance = self.channel_moments(loader)
            self.load_statistics(mean, channel_scale(variance, self.shrinkage))

    def refresh(self, loader: DataLoader, context: Context, first: bool = False) -> None:
        """Loads local statistics if the task standardises, unless pooled ones were loaded."""
        self.standardise_locally(loader)

    def loaded_statistics(self) -> dict[str, Tensor]:
        """Returns the loaded statistics, in the form of `load_statistics`, on the CPU."""
        loaded = {"mean": self.mean.cpu(), "scale": self.scale.cpu()}
        return (
            loaded if self.whiten is None else {**loaded, "whitening": upper_triangle(self.whitening.cpu())}
        )

    def draw(self, scores: Tensor) -> Tensor:
        """Draws patch scores [B * H0 * W0] as anomaly maps [B, H, W]."""
        maps: Tensor = self.draw_map(scores.reshape(-1, *self.grid))
        return maps

    def judge(self, scores: Tensor) -> Tensor:
        """Computes image scores [B] from patch scores [B * H0 * W0]: the peak of their map without its rim."""
        grids = scores.reshape(-1, *self.grid)
        if self.rim:
            rows, columns = (slice(self.rim, patches - self.rim) for patches in self.grid)
            inner = grids[:, rows, columns]
            # Filled with 0, the rim would be the peak of an image whose scores are all negative.
            lowest = inner.amin((1, 2), keepdim=True).clamp(max=0)
            grids = F.pad(inner - lowest, (self.rim,) * 4) + lowest
        pixels = self.draw_score(grids).flatten(1)
        if self.top == 0:
            return pixels.amax(1)
        return pixels.topk(max(1, round(self.top * pixels.shape[1])), dim=1).values.mean(1)


class SubspaceTask(PatchTask):
    """A patch task with a subspace of each product's normal features, and a memory that patches are compared with.

    The classes register these buffers.
    """

    free_buffers = ("centre", "basis")
    centre: Tensor
    basis: Tensor
    memory: Tensor
    radii: Tensor

    def load_subspace(self, centre: Tensor, basis: Tensor) -> None:
        """Loads the subspace of each product's normal features.

        Args:
            centre: Means of frozen features [N, C].
            basis: Directions outside the subspaces [N, C, R]; with a bank they are scaled, so that residuals of normal
                patches are as long as the bank's features.
        """
        self.centre, self.basis = centre.to(self.centre), basis.to(self.basis)

    def load_memory(self, memory: Tensor, radii: Tensor | None = None) -> None:
        """Loads a memory [K, C] and, if image scores use them, the usual distances of patches to its vectors [K]."""
        self.memory = memory.to(self.memory)
        if radii is not None:
            self.radii = radii.to(self.radii)


def _grid(size: tuple[int, int], grid: int, tile: int | None) -> tuple[int, int]:
    """Returns the rows and columns of square patches, if ``grid`` of them lie along a tile or the short side."""
    side = tile or min(size)
    rows, columns = (max(1, round(pixels * grid / side)) for pixels in size)
    if max(rows, columns) > MOST_PATCHES:
        raise UserError(
            f"task.grid={grid}: images of {size[0]} x {size[1]} pixels would have {rows} x {columns} patches; give a"
            f" smaller grid, for at most {MOST_PATCHES} a side"
        )
    return rows, columns


def sample_patches(number: int | None, *rows: Tensor) -> tuple[Tensor, ...]:
    """Draws random patches of each image, the same from all tensors [B, P, ...].

    Args:
        number: Number of patches of each image; None for all.
        *rows: Tensors [B, P, ...].

    Returns:
        Tensors [B, number, ...].
    """
    images, patches = rows[0].shape[:2]
    if number is None or number >= patches:
        return rows
    chosen = torch.rand(images, patches).argsort(dim=1)[:, :number, None].to(rows[0].device)
    return tuple(tensor.take_along_dim(chosen, dim=1) for tensor in rows)
