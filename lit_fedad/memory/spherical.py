"""Spherical k-means: clusters of directions, whose centres have length 1 (Dhillon and Modha, 2001)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from lit_fedad.memory.kmeans import KMeansResult, kmeans


@torch.no_grad()
def spherical_kmeans(
    rows: Tensor,
    clusters: int,
    *,
    generator: torch.Generator,
    weights: Tensor | None = None,
    max_steps: int = 10,
) -> KMeansResult:
    """Clusters rows by their directions: each belongs to the centre of largest cosine, the normalised mean of its rows.

    Args:
        rows: Rows ``[n, channels]``.
        clusters: Number of centres; with fewer rows, see `kmeans`.
        generator: Source of all randomness.
        weights: Non-negative weight of each row, ``[n]``; 1 by default.
        max_steps: Most moves of the centres.

    Returns:
        The clustering; ``centroids`` have length 1.

    Example:
        >>> rows = torch.tensor([[2.0, 0.0], [0.0, 3.0], [0.0, 1.0]])
        >>> found = spherical_kmeans(rows, 2, generator=torch.Generator().manual_seed(0))
        >>> sorted(found.centroids.tolist()), sorted(found.counts.tolist())
        ([[0.0, 1.0], [1.0, 0.0]], [1.0, 2.0])
    """
    # Rows and centres have length 1: the nearest centre is that of the largest cosine.
    return kmeans(
        F.normalize(rows, dim=1),
        clusters,
        generator=generator,
        weights=weights,
        max_steps=max_steps,
        tolerance=0.0,
        spherical=True,
    )
