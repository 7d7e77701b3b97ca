"""PaDiM: a Gaussian of normal features at each position of the image (Defard et al., ICPR Workshops 2021)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lit_fedad.contracts import Context, Prediction
from lit_fedad.contracts.compute import map_batches
from lit_fedad.core.bounds import above, at_least
from lit_fedad.core.errors import UserError
from lit_fedad.memory.moments import Moments, symmetric
from lit_fedad.models.backbones import FeaturePyramid
from lit_fedad.tasks.patches import PatchTask

CACHED = 1 << 18
"""Numbers of the matrices that are factored at once: 2 MB."""


class PaDiM(PatchTask):
    """The task whose patch score is the Mahalanobis distance to the normal patches at the same position.

    Images are expected to show their object at the same place. Features are those of channels drawn at random, which
    the paper finds as good as principal components. Image scores are the maximum of the smoothed map.

    A method may set the Gaussians; otherwise the task fits them to local data. There is nothing to train.

    Args:
        backbone: Frozen feature extractor.
        grid: Positions along the image's short side; see `PatchTask`.
        image_size: Side of the images in pixels, or their height and width.
        channels: Number of channels d, drawn from all of the backbone's layers.
        regularisation: epsilon, added to the variance of each channel (PaDiM Eq. 1).
        sigma: Standard deviation of the Gaussian smoothing of the map, in pixels.
        channel_seed: Seed of the drawn channels; the same for all clients.

    Raises:
        UserError: If a number is out of range.
    """

    prepares = True
    trains = False
    methods = "federated_padim, local or centralised"
    local_buffers = ("mean", "scale", "whitening", "centres", "whiteners")

    selected: Tensor
    centres: Tensor
    whiteners: Tensor

    def __init__(
        self,
        backbone: FeaturePyramid,
        grid: int = 56,
        image_size: int | Sequence[int] = 224,
        channels: int = 100,
        regularisation: float = 0.01,
        sigma: float = 4.0,
        channel_seed: int = 0,
    ) -> None:
        super().__init__(backbone, grid, image_size, False, 1.0, None, False, sigma, 0, 0.0)
        at_least("task", 1, channels=channels)
        above("task", 0, regularisation=regularisation)
        drawn = torch.randperm(self.channels, generator=torch.Generator().manual_seed(channel_seed))
        selected = drawn[:channels].sort().values
        self.regularisation = regularisation
        self.num_features = self.channels = len(selected)
        self.register_buffer("selected", selected, persistent=False)
        positions = self.vectors_per_image
        self.register_buffer("centres", torch.zeros(positions, self.channels))
        self.register_buffer("whiteners", torch.zeros(positions, self.channels, self.channels))

    def embed(self, batch: Mapping[str, Any], average_pool: bool | str | None = None) -> Tensor:
        """Computes the drawn channels [B, H0 * W0, d] of frozen features on the grid."""
        return super().embed(batch, average_pool)[..., self.selected]

    def forward(self, batch: Mapping[str, Any]) -> Tensor:
        """Computes features [B, H0 * W0, d]."""
        return self.embed(batch)

    @property
    def moment_sets(self) -> int:
        """Number of positions H0 * W0, each of which has moments of its own."""
        return self.vectors_per_image

    def moments(self, loader: DataLoader) -> list[Moments]:
        """Computes number, mean and covariance of the local features at each position."""
        moments = self.position_moments(loader)
        return [Moments(int(count), *rest) for count, *rest in zip(*moments.values(), strict=True)]

    @torch.no_grad()
    def position_moments(self, loader: DataLoader) -> dict[str, Tensor]:
        """Computes ``count`` [P], ``mean`` [P, d] and ``covariance`` [P, d, d] of local features at all positions."""
        count = 0
        shift = total = torch.zeros_like(self.centres, dtype=torch.float64)
        square = torch.zeros_like(self.whiteners, dtype=torch.float64)
        for features in map_batches(self, loader, self):
            rows = features.double().transpose(0, 1)
            # Sums around the first batch's mean keep small variances of channels that lie far from zero.
            shift = rows.mean(1) if count == 0 else shift
            rows = rows - shift[:, None]
            count += rows.shape[1]
            total = total + rows.sum(1)
            square.baddbmm_(rows.mT, rows)  # in place: at 56 x 56 positions of 100 channels it has 251 MB
        offset = total / max(count, 1)
        covariance = square.div_(max(count, 1)).baddbmm_(offset[:, :, None], offset[:, None], alpha=-1).cpu()
        counts = torch.full((len(shift),), count)
        return {"count": counts, "mean": (shift + offset).cpu(), "covariance": covariance}

    def fit_gaussians(self, moments: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Computes what `load_gaussians` loads.

        ``Sigma = 1/(n - 1) sum (x - m) (x - m)^T + epsilon I`` (PaDiM Eq. 1); of a single image it is epsilon alone.

        Args:
            moments: ``count`` [P], ``mean`` [P, d] and ``covariance`` [P, d, d] of all positions, float64.
        """
        counts = moments["count"].double()[:, None, None]
        whiteners = torch.empty_like(self.whiteners, device="cpu")
        identity = torch.eye(self.channels, dtype=torch.float64)
        for at in self._cached_positions():
            spread = moments["covariance"][at] * (counts[at] / (counts[at] - 1).clamp(min=1))
            # The factor of a matrix turned upside down is, turned back, the upper triangular U' of Sigma = U' U'^T.
            turned = torch.linalg.cholesky((spread + self.regularisation * identity).flip(1, 2))
            whiteners[at] = torch.linalg.solve_triangular(turned.flip(1, 2), identity, upper=True)
        return moments["mean"].float(), whiteners

    @torch.no_grad()
    def scores_without(self, loader: DataLoader, moments: Mapping[str, Tensor]) -> Tensor:
        """Computes image scores [n] by the Gaussians of all other images.

        The images' own part is subtracted from the covariance of each position, and one factor of what remains gives
        their distances.

        Args:
            loader: Images that are among those of the moments.
            moments: ``count`` [P], ``mean`` [P, d] and ``covariance``, the upper triangles [P, d (d + 1) / 2].

        Raises:
            UserError: If no image remains, or the moments are not those of images with these among them.
        """
        features = torch.cat([batch.cpu().float() for batch in map_batches(self, loader, self)])
        counts = moments["count"].double()
        rest = counts - len(features)
        if rest.min() < 1:
            raise UserError("no vector remains when a client's own are left out")
        divisors = (rest - 1).clamp(min=1)
        distances = torch.empty(features.shape[:2])
        for at in self._cached_positions():
            scatter = symmetric(moments["covariance"][at], self.channels).double()
            scatter *= counts[at, None, None]
            offsets = features[:, at].transpose(0, 1).double() - moments["mean"][at, None].double()
            shift = offsets.sum(1, keepdim=True) / rest[at, None, None]  # of the mean, without these images
            gone = torch.cat([offsets, shift * rest[at, None, None].sqrt()], dim=1)
            scatter.baddbmm_(gone.mT, gone, alpha=-1)
            scatter.diagonal(dim1=1, dim2=2).add_(divisors[at, None] * self.regularisation)
            factors, failed = torch.linalg.cholesky_ex(scatter)
            if failed.any():
                raise UserError("no covariance remains when a client's own vectors are left out")
            whitened = torch.linalg.solve_triangular(factors, (offsets + shift).mT, upper=False)
            distances[:, at] = (whitened.norm(dim=1).T * divisors[at].sqrt()).float()
        return self.judge(distances.flatten().to(self.centres)).cpu()

    def _cached_positions(self) -> list[slice]:
        """Cuts the positions into parts whose matrices stay in the processor's cache."""
        step = max(1, CACHED // self.channels**2)
        return [slice(start, start + step) for start in range(0, self.vectors_per_image, step)]

    def load_gaussians(self, centres: Tensor, whiteners: Tensor) -> None:
        """Loads the mean [P, d] of each position, and the factor U [P, d, d] of ``Sigma^-1 = U^T U``."""
        self.centres, self.whiteners = centres.to(self.centres), whiteners.to(self.whiteners)

    def refresh(self, loader: DataLoader, context: Context, first: bool = False) -> None:
        """Fits the Gaussians to local data, the first time."""
        if first:
            self.load_gaussians(*self.fit_gaussians(self.position_moments(loader)))

    def predict(self, features: Tensor, batch: Mapping[str, Any]) -> Prediction:
        """Scores images by the distances ``sqrt((x - m)^T Sigma^-1 (x - m))`` of their positions (PaDiM Eq. 2)."""
        offsets = features.float().transpose(0, 1) - self.centres[:, None]
        distances = (offsets @ self.whiteners.mT).norm(dim=2).T
        scores = distances.flatten()
        return Prediction(image_score=self.judge(scores), anomaly_map=self.draw(scores))
