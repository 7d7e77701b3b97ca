"""PaDiM: a Gaussian of normal features at each position of the image (Defard et al., ICPR Workshops 2021)."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lit_fedad.contracts import Context, Prediction
from lit_fedad.contracts.compute import full_precision, map_batches
from lit_fedad.core.bounds import above, at_least
from lit_fedad.memory.moments import MomentSets, cached_sets, upper_triangle
from lit_fedad.models.backbones import FeaturePyramid
from lit_fedad.tasks.patches import CHANNEL_STATISTICS, PatchTask

_MAX_VALUES = 1 << 26
"""Number of float32 values of features up to which batches are collected: 268 MB."""


class PaDiM(PatchTask):
    """The task whose patch score is the Mahalanobis distance to the normal patches at the same position.

    Images are expected to show their object at the same place. Features are some channels drawn at random, which the
    paper finds as good as principal components. Image scores are the maximum of the smoothed map. Deeper layers are
    enlarged bilinearly, as in all detectors here; the paper repeats their values.

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
    local_buffers = (*CHANNEL_STATISTICS, "centres", "whiteners")

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
        super().__init__(backbone, grid, image_size, standardise=False, average_pool=False, sigma=sigma)
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
    def position_moments(self, loader: DataLoader) -> MomentSets:
        """Computes the moments of local features at each position."""
        groups = _groups(map_batches(self, loader, self))
        return MomentSets.union([_moments(torch.cat(group)) for group in groups])

    def fit_gaussians(self, moments: MomentSets) -> tuple[Tensor, Tensor]:
        """Fits the Gaussians; returns the arguments of `load_gaussians`.

        ``Sigma = 1/(n - 1) sum (x - m) (x - m)^T + epsilon I`` (PaDiM Eq. 1); for a single image it is ``epsilon I``.

        Args:
            moments: Moments of the features at each position.
        """
        counts = moments.count.double()[:, None, None]
        whiteners = []
        identity = torch.eye(self.channels, dtype=torch.float64)
        for positions in cached_sets(*moments.mean.shape):
            block_counts = counts[positions]
            spread = moments.covariances(positions) * (block_counts / (block_counts - 1).clamp(min=1))
            spread.diagonal(dim1=1, dim2=2).add_(self.regularisation)
            # Cholesky of Sigma with rows and columns reversed gives, reversed again, the upper U' of Sigma = U' U'^T.
            reversed_factor = torch.linalg.cholesky(spread.flip(1, 2))
            inverse = torch.linalg.solve_triangular(reversed_factor.flip(1, 2), identity, upper=True)
            whiteners.append(upper_triangle(inverse.float()))
        centres = moments.mean.to(torch.float32, copy=True)  # no two tensors of a message share memory
        return centres, torch.cat(whiteners)

    @torch.no_grad()
    def scores_without(self, loaders: Iterable[DataLoader], moments: MomentSets) -> Iterator[Tensor | None]:
        """Computes the scores of images by the Gaussians of all images but those of the same loader.

        With ``A = n S + (r - 1) epsilon I`` and offsets x from the mean of all n images, the squared distances of k
        images from the mean of the r others are ``(r - 1) (diag((I - P)^-1) - 1 - 1/r)``, where
        ``P = X^T A^-1 X + 1/n`` are their leverages [k, k]. A has one factor for all loaders of equally many images.

        Args:
            loaders: Each has images that are in the moments, and that are left out together.
            moments: Moments of the features of all images at each position.

        Yields:
            The image scores [k] of a loader; None if no image remains, or no valid covariance.
        """
        features = (torch.cat([*map_batches(self, loader, self)]).cpu().float() for loader in loaders)
        for group in _groups(features):
            for squares in self._squares_without(group, moments):
                distances = squares.sqrt().flatten().to(self.centres)
                yield None if distances.isnan().any() else self.judge(distances).cpu()

    def _squares_without(self, group: Sequence[Tensor], moments: MomentSets) -> list[Tensor]:
        """Computes the squared distances [k, P] of each tensor of features [k, P, d]; NaN if no other image remains."""
        squares = [torch.empty(features.shape[:2], dtype=torch.float64) for features in group]
        for positions in cached_sets(*moments.mean.shape):
            counts = moments.count[positions, None, None].double()
            mean = moments.mean[positions, :, None].double()
            scatter, factors = moments.covariances(positions) * counts, {}
            for features, distances in zip(group, squares, strict=True):
                remaining = counts - len(features)
                freedom = (remaining - 1).clamp(min=1)
                if len(features) not in factors:
                    spread = scatter.clone()
                    spread.diagonal(dim1=1, dim2=2).add_(self.regularisation * freedom[:, 0])
                    factors[len(features)] = _factor(spread)
                offsets = features[:, positions].permute(1, 2, 0).double() - mean
                whitened = torch.linalg.solve_triangular(factors[len(features)], offsets, upper=False)
                group_squares = _left_out(whitened, remaining) * freedom[:, 0]
                distances[:, positions] = group_squares.masked_fill(remaining[:, 0] < 1, torch.nan).T
        return squares

    def load_gaussians(self, centres: Tensor, whiteners: Tensor) -> None:
        """Loads the mean [P, d] of each position, and the factor of ``Sigma^-1 = U^T U``.

        Args:
            centres: The means.
            whiteners: The upper triangles of U [P, d (d + 1) / 2].
        """
        rows, columns = torch.triu_indices(self.channels, self.channels)
        unpacked = torch.zeros_like(self.whiteners)
        unpacked[:, rows, columns] = whiteners.to(unpacked)
        self.centres, self.whiteners = centres.to(self.centres), unpacked

    def refresh(self, loader: DataLoader, context: Context, first: bool = False) -> None:
        """Fits the Gaussians to local data, the first time."""
        if first:
            self.load_gaussians(*self.fit_gaussians(self.position_moments(loader)))

    def predict(self, features: Tensor, batch: Mapping[str, Any]) -> Prediction:
        """Scores images by the distances ``sqrt((x - m)^T Sigma^-1 (x - m))`` of their positions (PaDiM Eq. 2)."""
        offsets = features.float().transpose(0, 1) - self.centres[:, None]
        with full_precision(offsets):
            distances = (offsets @ self.whiteners.mT).norm(dim=2).T
        scores = distances.flatten()
        return Prediction(image_score=self.judge(scores), anomaly_map=self.draw(scores))


def _groups(batches: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Collects features [B, P, d] of successive batches into groups that fit into memory together."""
    group: list[Tensor] = []
    for features in batches:
        group.append(features)
        if sum(member.numel() for member in group) >= _MAX_VALUES:
            yield group
            group = []
    if group:
        yield group


def _moments(features: Tensor) -> MomentSets:
    """Computes the moments of features [n, P, d] at each position, on the CPU."""
    mean = features.mean(0, dtype=torch.float64)
    triangles = []
    for positions in cached_sets(*mean.shape):
        rows = features[:, positions].transpose(0, 1) - mean[positions, None]
        triangles.append(upper_triangle(rows.mT @ rows) / len(features))
    return MomentSets(torch.full((len(mean),), len(features)), mean.cpu(), torch.cat(triangles).cpu())


def _factor(matrices: Tensor) -> Tensor:
    """Computes the Cholesky factors of symmetric matrices [..., d, d]; NaN for those that are not positive definite."""
    factors, failed = torch.linalg.cholesky_ex(matrices)
    return factors.masked_fill_((failed > 0)[..., None, None], torch.nan)


def _left_out(whitened: Tensor, remaining: Tensor) -> Tensor:
    """Computes ``diag((I - P)^-1) - 1 - 1/r`` of leverages ``P = W^T W + 1/n``; see `PaDiM.scores_without`.

    Args:
        whitened: Vectors W [P, d, k].
        remaining: Numbers r of other vectors [P, 1, 1]; n is r + k.
    """
    channels, count = whitened.shape[1:]
    if count <= channels:
        identity = torch.eye(count, dtype=whitened.dtype)
        root = _factor(identity - whitened.mT @ whitened - 1 / (remaining + count))
        inverse = torch.linalg.solve_triangular(root, identity, upper=False)
        return (inverse.square().sum(1) - 1 - 1 / remaining[:, 0]).clamp(min=0)
    # The same result by a matrix [d, d], which is smaller here than [k, k].
    shifted = whitened + whitened.sum(2, keepdim=True) / remaining
    root = _factor(torch.eye(channels, dtype=whitened.dtype) - shifted @ whitened.mT)
    return torch.linalg.solve_triangular(root, shifted, upper=False).square().sum(1)
