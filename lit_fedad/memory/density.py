"""Gaussian densities of features: estimated with shrinkage on coarse clusters, scored by Mahalanobis distance."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lit_fedad.contracts.compute import full_precision
from lit_fedad.contracts.state import take_sizes
from lit_fedad.core.errors import UserError
from lit_fedad.memory.kmeans import kmeans
from lit_fedad.memory.knn import nearest

_MIN_VARIANCE = 1e-10
"""Smallest mean variance in the ridge, as a share of the features' mean square: larger than rounding of float32."""

_EARLY_STOP = 5
"""Lloyd iterations after which the clustering stops."""


@dataclass(frozen=True)
class Densities:
    """Gaussians over features.

    Attributes:
        mean: Means [K, D].
        covariance: Covariances after shrinkage [K, D, D].
        count: Number of features of each [K].
    """

    mean: Tensor
    covariance: Tensor
    count: Tensor


@torch.no_grad()
def estimate_densities(
    features: Tensor, clusters: int, shrinkage: float, generator: torch.Generator
) -> Densities:
    """Estimates a Gaussian for each cluster of a clustering that stops early: noisy density estimation.

    Mean: FADngs Eq. 1. Covariance: FADngs Eq. 2. Shrinkage: FADngs Eq. 3. Features that are in a wrong cluster, because
    the clustering stops early, are the noise of FADngs Eq. 4 and FADngs Eq. 5; no other noise is added. A cluster of a
    single feature is merged into the nearest larger one, and there is at most one cluster for two features. Shrinkage
    keeps covariances positive definite even if features have collapsed to a point.

    Args:
        features: Rows [n, D].
        clusters: Number of clusters K; 1 for a single Gaussian.
        shrinkage: Shrinkage rho in [0, 1] (FADngs Eq. 3).
        generator: Source of the randomness of the clustering.

    Returns:
        At most K densities, in single precision; none from fewer than two features.

    Example:
        >>> features = torch.tensor([[0.0, 0.0], [2.0, 0.0], [0.0, 2.0], [2.0, 2.0]])
        >>> found = estimate_densities(features, 1, 0.5, torch.Generator())
        >>> found.mean.tolist(), found.covariance.tolist(), found.count.tolist()
        ([[1.0, 1.0]], [[[1.0, 0.0], [0.0, 1.0]]], [4.0])
    """
    features = features.double()
    size, width = features.shape
    if size < 2:
        return Densities(torch.empty(0, width), torch.empty(0, width, width), torch.empty(0))
    clusters = min(clusters, size // 2)
    owner = torch.zeros(size, dtype=torch.int64, device=features.device)  # the cluster of each feature
    if clusters > 1:
        clustering = kmeans(features, clusters, generator=generator, max_steps=_EARLY_STOP, tolerance=0.0)
        owner = _without_single(features, clustering.assignment, clustering.centroids)
    means, covariances, counts = [], [], []
    # The lower bound keeps the covariance positive definite if features have collapsed to a point.
    min_variance = _MIN_VARIANCE * features.square().mean()
    for cluster in owner.unique().tolist():
        members = features[owner == cluster]
        mean = members.mean(0)
        centred = members - mean
        covariance = centred.T @ centred / len(members)
        ridge = max(covariance.trace() / width, min_variance) * torch.eye(
            width, dtype=torch.float64, device=features.device
        )
        means.append(mean)
        covariances.append((1 - shrinkage) * covariance + shrinkage * ridge)
        counts.append(float(len(members)))
    return Densities(torch.stack(means).float(), torch.stack(covariances).float(), torch.tensor(counts))


def _without_single(features: Tensor, owner: Tensor, centroids: Tensor) -> Tensor:
    """Assigns features that are alone in their cluster to the nearest cluster with more than one."""
    sizes = torch.bincount(owner, minlength=len(centroids))
    large, lone = (sizes > 1).nonzero()[:, 0], (sizes[owner] == 1).nonzero()[:, 0]
    if not len(lone):
        return owner
    owner = owner.clone()
    owner[lone] = large[nearest(features[lone], centroids[large], 1)[1][:, 0]]
    return owner


class DensitySet(nn.Module):
    """Set of densities that features are scored against; loading a state may change their number M.

    Args:
        width: Number of features D.

    Attributes:
        mean: Means [M, D].
        covariance: Covariances [M, D, D].
    """

    mean: Tensor
    covariance: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.empty(0, width))
        self.register_buffer("covariance", torch.empty(0, width, width))
        self._whitening: Tensor | None = None

    def __len__(self) -> int:
        return len(self.mean)

    def set(self, mean: Tensor, covariance: Tensor) -> None:
        """Replaces all densities.

        Args:
            mean: Means [M, D].
            covariance: Covariances [M, D, D], positive definite.
        """
        before = self.covariance
        self.mean, self.covariance = mean.to(self.mean), covariance.to(self.covariance)
        self._forget_whitening(before)

    def forward(self, features: Tensor) -> Tensor:
        """Computes the squared Mahalanobis distance to the nearest density (FADngs Eq. 6).

        Args:
            features: Rows [n, D].

        Returns:
            Scores [n].

        Raises:
            UserError: If there is no density, or one is not positive definite.
        """
        if not len(self):
            raise UserError(
                "there are no densities to score by: they take two training images of the client, or under"
                " METHOD=fadngs of any client; give it more"
            )
        width = features.shape[1]
        with full_precision(features):
            whitening = self._whiten()
            # One product whitens the features by all densities; the means are whitened likewise.
            whitened = features.float() @ whitening.reshape(-1, width).T
            means = torch.einsum("mij,mj->mi", whitening, self.mean)
            return (whitened.view(features.shape[0], -1, width) - means).square().sum(2).amin(1)

    def _whiten(self) -> Tensor:
        """Computes L^-1 of each covariance L L^T [M, D, D]."""
        # It is inverted, though a triangular solve for each score would be faster, since ONNX has no such solve.
        if self._whitening is None or self._whitening.device != self.mean.device:
            covariance = self.covariance.double()
            factor, failed = torch.linalg.cholesky_ex(covariance)
            failures = failed.nonzero()
            if len(failures) or not torch.isfinite(factor).all():
                density = int(failures[0]) if len(failures) else 0
                raise UserError(
                    f"density {density} is not positive definite: raise task.shrinkage, or lower the learning rate"
                    " if features have collapsed"
                )
            unit = torch.eye(covariance.shape[1], dtype=torch.float64, device=covariance.device)
            self._whitening = torch.linalg.solve_triangular(
                factor, unit.expand_as(factor), upper=False
            ).float()
        return self._whitening

    def _forget_whitening(self, before: Tensor) -> None:
        """Drops the whitening if covariances have changed; clients that take turns often get the same ones."""
        if before is not self.covariance and not torch.equal(before, self.covariance):
            self._whitening = None

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        before = self.covariance
        take_sizes(self, ("mean", "covariance"), state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *rest)
        self._forget_whitening(before)
