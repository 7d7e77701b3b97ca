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
from lit_fedad.memory.moments import Moments
from lit_fedad.models.backbones import FeaturePyramid
from lit_fedad.tasks.patches import PatchTask


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

    @torch.no_grad()
    def moments(self, loader: DataLoader) -> list[Moments]:
        """Computes number, mean and covariance of the local features at each position."""
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
        means = (shift + offset).cpu()
        return [Moments(count, mean, part) for mean, part in zip(means, covariance, strict=True)]

    def fit_gaussians(self, moments: Sequence[Moments]) -> tuple[Tensor, Tensor]:
        """Computes what `load_gaussians` loads from the moments at each position.

        ``Sigma = 1/(n - 1) sum (x - m) (x - m)^T + epsilon I`` (PaDiM Eq. 1); of a single image it is epsilon alone.
        """
        counts = torch.tensor([part.count for part in moments], dtype=torch.float64)[:, None, None]
        covariance = torch.stack([part.covariance for part in moments]) * (counts / (counts - 1).clamp(min=1))
        regular = covariance + self.regularisation * torch.eye(self.channels, dtype=torch.float64)
        inverse = torch.cholesky_inverse(torch.linalg.cholesky(regular))
        centres = torch.stack([part.mean for part in moments])
        return centres.float(), torch.linalg.cholesky(inverse, upper=True).float()

    def load_gaussians(self, centres: Tensor, whiteners: Tensor) -> None:
        """Loads the mean [P, d] of each position, and the factor U [P, d, d] of ``Sigma^-1 = U^T U``."""
        self.centres, self.whiteners = centres.to(self.centres), whiteners.to(self.whiteners)

    def refresh(self, loader: DataLoader, context: Context, first: bool = False) -> None:
        """Fits the Gaussians to local data, the first time."""
        if first:
            self.load_gaussians(*self.fit_gaussians(self.moments(loader)))

    def predict(self, features: Tensor, batch: Mapping[str, Any]) -> Prediction:
        """Scores images by the distances ``sqrt((x - m)^T Sigma^-1 (x - m))`` of their positions (PaDiM Eq. 2)."""
        offsets = features.float().transpose(0, 1) - self.centres[:, None]
        distances = (offsets @ self.whiteners.mT).norm(dim=2).T
        scores = distances.flatten()
        return Prediction(image_score=self.judge(scores), anomaly_map=self.draw(scores))

    def objective(self, features: Tensor, batch: Mapping[str, Any]) -> dict[str, Tensor]:
        """Refuses to train.

        Raises:
            UserError: Always: there is nothing to train.
        """
        raise UserError("task PaDiM has nothing to train: give METHOD=federated_padim, local or centralised")

    def on_fit_start(self) -> None:
        """Refuses a plain Trainer; see `objective`."""
        self.objective(self.centres, {})
