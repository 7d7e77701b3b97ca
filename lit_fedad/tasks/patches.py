"""Frozen patch features of a backbone: what every detector on patches looks at, and the maps that it draws."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lit_fedad.contracts import StandardisedTask
from lit_fedad.contracts.batches import map_batches
from lit_fedad.contracts.precision import full_precision
from lit_fedad.contracts.task import channel_scale
from lit_fedad.errors import UserError
from lit_fedad.guards.bounds import at_least, within
from lit_fedad.memory.moments import Moments
from lit_fedad.models.anomaly_map import AnomalyMap
from lit_fedad.models.backbones import FeaturePyramid


class PatchTask(StandardisedTask):
    """A task on the patch features of a frozen backbone.

    Features of several layers are resized to one grid and concatenated (FedDyMem Eq. 8), and optionally standardised
    per channel. Scores of patches are drawn as smoothed maps.

    Args:
        backbone: Frozen feature extractor.
        grid: Side of the patch grid, H0 = W0.
        image_size: Side of the images, in pixels.
        standardise: Whether channels are standardised over the training patches.
        shrinkage: See `channel_scale`.
        average_pool: Whether each layer is averaged over 3x3 neighbouring positions, as in CFA and PatchCore.
        sigma: Standard deviation of the Gaussian smoothing of the map, in pixels.
        rim: Patches at each side of the grid that image scores leave out: features there depend on what the backbone
            pads its input with.
        top: Share of a map's pixels, the highest, whose mean is the image score; 0 for the maximum.

    Raises:
        UserError: If a number is out of range.
    """

    local_buffers: tuple[str, ...] = ("mean", "scale")

    mean: Tensor
    scale: Tensor
    places: Tensor

    def __init__(
        self,
        backbone: FeaturePyramid,
        grid: int,
        image_size: int,
        standardise: bool,
        shrinkage: float,
        average_pool: bool,
        sigma: float,
        rim: int,
        top: float,
    ) -> None:
        super().__init__()
        at_least("task", 1, grid=grid, image_size=image_size)
        at_least("task", 0, sigma=sigma, rim=rim, shrinkage=shrinkage)
        within("task", 0, 1, top=top)
        if 2 * rim >= grid:
            raise UserError(f"task.rim={rim} leaves nothing of a grid of {grid} patches a side")
        self.backbone = backbone
        self.num_features = sum(backbone.channels)
        self.grid, self.vectors_per_image = grid, grid * grid
        self.standardise, self.shrinkage, self.average_pool = standardise, shrinkage, average_pool
        self.rim, self.top = rim, top
        self.draw_map = AnomalyMap(grid, image_size, sigma)
        # Values that are not yet set are NaN.
        self.register_buffer("mean", torch.full((self.num_features,), torch.nan if standardise else 0.0))
        self.register_buffer("scale", torch.ones(self.num_features))
        side = (torch.arange(grid) + 0.5) / grid * 2 - 1
        y, x = torch.meshgrid(side, side, indexing="ij")
        self.register_buffer("places", torch.stack([x.flatten(), y.flatten()], dim=1), persistent=False)

    def embed(self, batch: Mapping[str, Any]) -> Tensor:
        """Computes frozen features on the grid (FedDyMem Eq. 8).

        Args:
            batch: With ``pyramid`` (cached features of each layer) or ``image`` [B, 3, S, S].

        Returns:
            Patch features [B, grid * grid, C], not standardised.
        """
        with full_precision(self.mean):  # as cached features are computed
            pyramid = batch["pyramid"] if "pyramid" in batch else self.backbone(batch["image"])
        layers = []
        for layer in pyramid:
            if self.average_pool:
                layer = F.avg_pool2d(layer, 3, stride=1, padding=1)
            if layer.shape[-1] != self.grid:
                layer = F.interpolate(
                    layer, size=(self.grid, self.grid), mode="bilinear", align_corners=False
                )
            layers.append(layer.flatten(2))
        return torch.cat(layers, dim=1).transpose(1, 2)

    def standardised(self, patches: Tensor) -> Tensor:
        """Standardises patch features [..., C] by the statistics that are loaded; before, they stay as they are."""
        return (patches - self.mean) / self.scale

    @torch.no_grad()
    def channel_moments(self, loader: DataLoader) -> tuple[int, Tensor, Tensor]:
        """Computes number, mean [C] and variance [C] of all local frozen patch features, in one pass."""
        count = 0
        shift = total = square = torch.zeros(self.num_features, dtype=torch.float64)
        for features in map_batches(self, loader, self.embed):
            patches = features.flatten(0, 1).double().cpu()
            # Sums around the first batch's mean keep the variance exact for channels far from zero.
            shift = patches.mean(0) if count == 0 else shift
            count += len(patches)
            total, square = total + (patches - shift).sum(0), square + (patches - shift).square().sum(0)
        mean = total / count
        return count, (shift + mean).float(), (square / count - mean**2).clamp(min=0).float()

    @torch.no_grad()
    def second_moments(self, loader: DataLoader, folds: int = 1) -> list[Moments]:
        """Computes the moments of all local frozen patch features.

        Args:
            loader: Local batches.
            folds: Number of sets that images are dealt to in turn.

        Returns:
            Number, mean and covariance of each set's patches.
        """
        return [Moments.of(self._fold(loader, fold, folds), self.num_features) for fold in range(folds)]

    def _fold(self, loader: DataLoader, fold: int, folds: int) -> Iterator[Tensor]:
        """Yields the patches [n, C] of every image whose number, in the loader's order, is that of a fold."""
        seen = 0
        for features in map_batches(self, loader, self.embed):
            own = features[(fold - seen) % folds :: folds]
            seen += len(features)
            if len(own):
                yield own.flatten(0, 1)

    def load_statistics(self, mean: Tensor, scale: Tensor) -> None:
        """Loads the mean [C] and the scale [C] that channels are standardised by."""
        self.mean, self.scale = mean.to(self.mean), scale.to(self.scale)

    def measure(self, loader: DataLoader) -> None:
        """Computes the mean and the scale of local features, unless some were loaded."""
        if self.mean.isnan().any():
            _, mean, variance = self.channel_moments(loader)
            self.load_statistics(mean, channel_scale(variance, self.shrinkage))

    def draw(self, scores: Tensor) -> Tensor:
        """Draws patch scores [B * grid * grid] as anomaly maps [B, S, S]."""
        maps: Tensor = self.draw_map(scores.reshape(-1, self.grid, self.grid))
        return maps

    def judge(self, scores: Tensor) -> Tensor:
        """Computes image scores [B] of patch scores [B * grid * grid]: the peak of their map, the rim left out."""
        squares = scores.reshape(-1, self.grid, self.grid)
        if self.rim:
            inner = slice(self.rim, self.grid - self.rim)
            squares = F.pad(squares[:, inner, inner], (self.rim,) * 4)
        pixels = self.draw(squares).flatten(1)
        if self.top == 0:
            return pixels.amax(1)
        return pixels.topk(max(1, round(self.top * pixels.shape[1])), dim=1).values.mean(1)
