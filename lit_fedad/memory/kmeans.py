"""Weighted k-means: Lloyd's iterations over the exact nearest-neighbour kernel, from one generator."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from lit_fedad.core.errors import UserError
from lit_fedad.memory.knn import (
    chunks,
    mean_of_middle_half,
    nearest,
    neighbour_distances,
    squared_distances,
    working_dtype,
)

_PROPOSALS = 256
_MIN_SAVING = 0.25
"""Share of all comparisons from which on it saves time to copy points and compare them with some centroids only."""


@dataclass(frozen=True)
class KMeansResult:
    """Centroids and the points nearest to each of them.

    Attributes:
        centroids: Rows ``[clusters, channels]``, at least single precision.
        counts: Weight of the points nearest to each centroid, ``[clusters]``.
        assignment: The nearest centroid of every point, ``[n]`` int64.
        inertia: Weighted sum of squared distances to the nearest centroid.
        steps: Number of times the centroids were moved.
    """

    centroids: Tensor
    counts: Tensor
    assignment: Tensor
    inertia: float
    steps: int


@torch.no_grad()
def kmeans(
    points: Tensor,
    clusters: int,
    *,
    generator: torch.Generator,
    weights: Tensor | None = None,
    initial: Tensor | None = None,
    max_steps: int = 20,
    tolerance: float = 1e-4,
    spherical: bool = False,
) -> KMeansResult:
    """Clusters rows by Lloyd's algorithm (Lloyd, 1982) from k-means++ seeds (Arthur and Vassilvitskii, 2007).

    An empty cluster keeps its centroid. Assignment, counts and inertia belong to the centroids returned. With
    fewer points than clusters and no ``initial``, every point is a centroid, and the surplus centroids are copies
    of points drawn by weight, with count 0. Means are accumulated in double precision.

    Args:
        points: Rows ``[n, channels]``.
        clusters: Number of centroids.
        generator: Source of all randomness; not used when ``initial`` is given.
        weights: Non-negative weight of each point, ``[n]``; 1 by default.
        initial: Centroids to start from, ``[clusters, channels]``, instead of seeds; they keep their order.
        max_steps: Largest number of moves of the centroids.
        tolerance: Share of the inertia; iterations stop when a move lowers the inertia by no more than this.
        spherical: Whether points and centroids are scaled to length 1, so that each point belongs to the centroid
            of the largest cosine (Dhillon and Modha, 2001).

    Returns:
        The clustering.

    Raises:
        UserError: There is no point, or all weights are zero.
        ValueError: Shapes do not fit, a weight is negative or ``clusters`` is not positive.

    Example:
        >>> points = torch.tensor([[0.0], [1.0], [9.0], [11.0]])
        >>> found = kmeans(points, 2, generator=torch.Generator(), initial=torch.tensor([[0.0], [9.0]]))
        >>> found.centroids.flatten().tolist(), found.counts.tolist(), found.inertia
        ([0.5, 10.0], [2.0, 2.0], 2.5)
    """
    mass = _checked_weights(points, clusters, weights, initial)
    if spherical:
        points = F.normalize(points, dim=1)
    if initial is not None:
        centroids = initial.to(working_dtype(points, initial), copy=True)
    elif len(points) < clusters:
        return _every_point_a_centroid(points, clusters, mass, generator)
    else:
        seeds = plus_plus_seeds(points, clusters, mass, generator)
        centroids = points[seeds].to(working_dtype(points))

    steps = 0
    distances, assignment = (column[:, 0] for column in nearest(points, centroids, k=1))
    inertia = _inertia(distances, mass)
    sums = torch.zeros(centroids.shape, dtype=mass.dtype, device=mass.device)
    summed_in = torch.full_like(assignment, -1)  # the cluster whose sum contains each point
    while steps < max_steps and inertia > 0:
        _carry_over(sums, points, summed_in, assignment, mass, weighted=weights is not None)
        summed_in = assignment
        last, centroids = centroids, _means(sums, assignment, mass, centroids)
        if spherical:
            centroids = F.normalize(centroids, dim=1)
        distances, assignment = _reassign(points, last, centroids, distances, assignment)
        previous, inertia = inertia, _inertia(distances, mass)
        steps += 1
        if previous - inertia <= tolerance * previous:
            break
    counts = torch.bincount(assignment, mass, minlength=clusters).to(centroids.dtype)
    return KMeansResult(centroids, counts, assignment, inertia, steps)


def add_by_slot(sums: Tensor, rows: Tensor, assignment: Tensor, mass: Tensor) -> None:
    """Adds every row, times its mass, to the sum of the slot it is assigned to, in double precision.

    Args:
        sums: Double precision sums ``[slots, channels]``, changed in place.
        rows: Rows ``[n, channels]``.
        assignment: Slot of each row, ``[n]`` int64.
        mass: Factor of each row, ``[n]`` double.
    """
    for part in chunks(len(rows), sums.dtype.itemsize * rows.shape[1]):
        sums.index_add_(0, assignment[part], rows[part].to(sums.dtype) * mass[part, None])


def plus_plus_seeds(points: Tensor, clusters: int, mass: Tensor, generator: torch.Generator) -> Tensor:
    """Draws k-means++ seeds: each by weight times squared distance to the nearest seed before it.

    Drawing proposals from outdated distances, and accepting each with probability (distance now / distance then)
    squared, gives the same distribution. So proposals come in batches, and one matrix product a batch updates all
    distances. Once all points coincide with seeds, the remaining seeds are drawn by weight.

    Args:
        points: Rows ``[n, channels]``.
        clusters: Number of seeds, at most ``n``.
        mass: Weight of each point, ``[n]`` double.
        generator: Source of all randomness.

    Returns:
        Indices of the seeds, ``[clusters]``, in the order they were drawn.
    """
    seeds = _draw(mass, 1, generator)
    stale = torch.full_like(mass, torch.inf)
    batch = seeds
    while len(seeds) < clusters:
        distances, _ = nearest(points, points[batch], k=1)
        stale = torch.minimum(stale, distances[:, 0].to(mass.dtype).square())
        potential = mass * stale
        if not potential.sum() > 0:
            return torch.cat([seeds, _draw(mass, clusters - len(seeds), generator)])
        proposals = _draw(potential, _PROPOSALS, generator)
        batch = _accept(points, proposals, stale[proposals], clusters - len(seeds), generator)
        seeds = torch.cat([seeds, batch])
    return seeds


def _accept(
    points: Tensor, proposals: Tensor, stale: Tensor, at_most: int, generator: torch.Generator
) -> Tensor:
    """Selects the proposals that become seeds, in order; the first always does."""
    rows = points[proposals].to(working_dtype(points))
    rows = rows - mean_of_middle_half(rows)
    squares = squared_distances(rows, rows, rows.square().sum(1)).double()
    table = squares.masked_fill_(proposals[:, None] == proposals, 0).cpu().numpy()
    draws = torch.rand(len(rows), generator=generator, dtype=torch.float64, device=generator.device)
    needed = stale.cpu().numpy() * draws.cpu().numpy()
    current = stale.cpu().numpy().copy()
    accepted: list[int] = []
    for proposal in range(len(rows)):
        if needed[proposal] < current[proposal] and len(accepted) < at_most:
            accepted.append(proposal)
            current.clip(max=table[proposal], out=current)
    return proposals[torch.tensor(accepted, device=proposals.device)]


def _draw(mass: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Draws indices with replacement, with probability proportional to the mass."""
    cumulative = mass.cumsum(0)
    draws = torch.rand(count, generator=generator, dtype=torch.float64, device=generator.device)
    indices = torch.searchsorted(cumulative, draws.to(mass.device) * cumulative[-1], right=True)
    return indices.clamp_(max=len(mass) - 1)


def _inertia(distances: Tensor, mass: Tensor) -> float:
    return (mass * distances.to(mass.dtype).square()).sum().item()


def _reassign(
    points: Tensor, last: Tensor, centroids: Tensor, distances: Tensor, assignment: Tensor
) -> tuple[Tensor, Tensor]:
    """Finds the nearest centroid of each point after the centroids have moved.

    A point that is no farther from its centroid than before is compared only with centroids that have moved: those that
    have not were not nearer before, and are not nearer now.
    """
    own, slots = neighbour_distances(points, centroids, assignment[:, None])[:, 0], assignment.clone()
    moved, farther = (centroids != last).any(1), own > distances
    saved = int((~farther).sum()) * int((~moved).sum())
    if saved < _MIN_SAVING * len(points) * len(centroids):
        best, best_slots = (column[:, 0] for column in nearest(points, centroids, k=1))
        nearer = best < own
        return torch.where(nearer, best, own), torch.where(nearer, best_slots, slots)
    for chosen, rivals in ((farther, torch.ones_like(moved)), (~farther, moved)):
        rows, rival_slots = chosen.nonzero()[:, 0], rivals.nonzero()[:, 0]
        if len(rows) and len(rival_slots):
            best, columns = nearest(points[rows], centroids[rival_slots], k=1)
            nearer = best[:, 0] < own[rows]
            own[rows[nearer]], slots[rows[nearer]] = best[nearer, 0], rival_slots[columns[nearer, 0]]
    return own, slots


def _carry_over(
    sums: Tensor, points: Tensor, before: Tensor, after: Tensor, mass: Tensor, *, weighted: bool
) -> None:
    """Moves the points that changed cluster from the sum of the old cluster to that of the new one.

    All points are summed anew if half of them changed, or if they have weights: subtracting a heavy point leaves a
    rounding error in the sum that may be larger than a light point.
    """
    changed = (before != after).nonzero()[:, 0]
    if weighted or 2 * len(changed) >= len(points):
        add_by_slot(sums.zero_(), points, after, mass)
        return
    rows = points[changed]
    add_by_slot(sums, rows, before[changed], -mass[changed])
    add_by_slot(sums, rows, after[changed], mass[changed])


def _means(sums: Tensor, assignment: Tensor, mass: Tensor, centroids: Tensor) -> Tensor:
    totals = torch.bincount(assignment, mass, minlength=len(centroids))[:, None]
    return torch.where(totals > 0, sums / totals, centroids).to(centroids.dtype)


def _every_point_a_centroid(
    points: Tensor, clusters: int, mass: Tensor, generator: torch.Generator
) -> KMeansResult:
    surplus = _draw(mass, clusters - len(points), generator)
    centroids = torch.cat([points, points[surplus]]).to(working_dtype(points))
    counts = torch.cat([mass, torch.zeros_like(mass[:1]).expand(len(surplus))]).to(centroids.dtype)
    return KMeansResult(centroids, counts, torch.arange(len(points), device=points.device), 0.0, 0)


def _checked_weights(points: Tensor, clusters: int, weights: Tensor | None, initial: Tensor | None) -> Tensor:
    """Checks all shapes and weights; returns the weights in double precision."""
    if points.ndim != 2 or clusters < 1:
        raise ValueError(
            f"k-means needs rows and at least one cluster, not {list(points.shape)} and {clusters}"
        )
    if initial is not None and initial.shape != (clusters, points.shape[1]):
        raise ValueError(
            f"initial centroids must be {[clusters, points.shape[1]]}, not {list(initial.shape)}"
        )
    if len(points) == 0:
        raise UserError("k-means has no points to cluster: drop clients without samples before clustering")
    if weights is None:
        return torch.ones(len(points), dtype=torch.float64, device=points.device)
    if weights.shape != (len(points),) or bool((weights < 0).any()):
        raise ValueError(f"weights must be {len(points)} non-negative numbers, one a point")
    if not weights.sum() > 0:
        raise UserError("all k-means weights are zero: give at least one point a positive weight")
    return weights.to(points.device, torch.float64)
