"""The subspace of normal vectors; the part of a vector outside it, the PCA residual, is anomalous."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn import functional as F

from lit_fedad.contracts.compute import full_precision, one_thread
from lit_fedad.contracts.task import channel_scale
from lit_fedad.core.bounds import above, within
from lit_fedad.core.errors import UserError
from lit_fedad.memory.moments import Moments, symmetric, upper_triangle

LIKELIHOOD = "likelihood"
"""Used instead of a share of variance: the number of dimensions under which held-out normal vectors are likeliest."""

Share = float | str

_MIN_SHARE = 1e-6
"""Smallest share of the variance that residuals are assumed to have."""

_MIN_VARIANCE = 1e-10
"""Smallest variance by which features are whitened: equal features, or those of a single patch, have variance 0."""


def check_share(**shares: Share | None) -> None:
    """Checks shares of variance.

    Args:
        **shares: Shares by key of ``task``; None for no subspace.

    Raises:
        UserError: If one is neither in (0, 1] nor `LIKELIHOOD`.
    """
    for key, share in shares.items():
        if isinstance(share, str):
            if share != LIKELIHOOD:
                raise UserError(f"task.{key}='{share}' must be a number or '{LIKELIHOOD}'")
        else:
            above("task", 0, **{key: share})
            within("task", 0, 1, **{key: share})


def folds_of(share: Share | None) -> int:
    """Returns the number of sets into which normal images are divided to choose the number of dimensions."""
    return 2 if isinstance(share, str) else 1


def fit_basis(folds: Sequence[Moments], share: Share) -> Tensor:
    """Computes a basis [C, R] of the directions outside the subspace of normal vectors.

    Args:
        folds: Moments of as many disjoint sets of normal vectors as `folds_of` says.
        share: Share of variance of the subspace, or `LIKELIHOOD`.
    """
    if isinstance(share, str):
        return likeliest_basis(folds)
    return residual_basis(Moments.union(folds), share)


def statistics_of(
    moments: Moments, standardise: bool, shrinkage: float, whiten: float | None
) -> dict[str, Tensor]:
    """Computes the statistics by which features are standardised and whitened.

    Args:
        moments: Moments of the features.
        standardise: Whether each channel is divided by its scale.
        shrinkage: See `channel_scale`.
        whiten: Share of the mean variance, of standardised features, that is added to the variance of every
            direction; None for no whitening.

    Returns:
        ``mean`` and ``scale`` [C] and, with ``whiten``, ``whitening`` [C (C + 1) / 2]: the upper triangle of the
        symmetric matrix ``(S + whiten * mean variance * I)^(-1/2)``, with S the covariance of standardised features.
        All are float32.
    """
    mean = moments.mean.float()
    scale = channel_scale(moments.variance, shrinkage).float() if standardise else torch.ones_like(mean)
    if whiten is None:
        return {"mean": mean, "scale": scale}
    variances, directions = _directions(moments.scaled(scale))
    root = (variances + whiten * variances.mean()).clamp(min=_MIN_VARIANCE).sqrt()
    return {
        "mean": mean,
        "scale": scale,
        "whitening": upper_triangle((directions / root) @ directions.T).float(),
    }


def typical_norm(moments: Moments, statistics: Mapping[str, Tensor]) -> Tensor:
    """Computes the root mean square length of features after standardisation and whitening, a scalar.

    Args:
        moments: Moments of the features before standardisation.
        statistics: See `statistics_of`; empty if features stay as they are.
    """
    covariance = moments.scaled(statistics["scale"]).covariance if statistics else moments.covariance
    if "whitening" in statistics:
        whitening = symmetric(statistics["whitening"], len(covariance)).double()
        return (whitening * (covariance @ whitening)).sum().sqrt().float()
    return covariance.trace().sqrt().float()


def fit_subspace(folds: Sequence[Moments], share: Share, shrinkage: float | None) -> tuple[Tensor, Tensor]:
    """Fits the subspace of normal features, each channel divided by its scale s.

    The returned directions are for features f that are not scaled: ``|B^T (f - c) / s| = |(B / s)^T (f - c)|``.

    Args:
        folds: See `fit_basis`.
        share: See `fit_basis`.
        shrinkage: See `channel_scale`; None for no scale.

    Returns:
        The mean c of the features [C], and directions [C, R] whose products with a centred feature are its residual.
    """
    total = Moments.union(folds)
    scale = _scale(total, shrinkage)
    basis = fit_basis([fold.scaled(scale) for fold in folds], share)
    return total.mean.float(), (basis.double() / scale[:, None]).float().contiguous()


def _scale(moments: Moments, shrinkage: float | None) -> Tensor:
    return torch.ones_like(moments.mean) if shrinkage is None else channel_scale(moments.variance, shrinkage)


def fit_subspaces(
    sets: Sequence[Moments], share: Share, shrinkage: float | None, length: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Fits a subspace to the features of each product; see `fit_subspace`.

    Args:
        sets: Moments product by product, for each as many sets as `folds_of` says. A product is left out if one of its
            sets has no vector.
        share: See `fit_basis`.
        shrinkage: See `channel_scale`.
        length: Root mean square length to which the residuals of these features, each outside its own product's
            subspace, are scaled; None for no scaling.

    Returns:
        The centres [P, C], and directions [P, C, R]; products with fewer directions than R have some of length 0.

    Raises:
        UserError: If no product has vectors in every set, or all vectors of these products are equal.
    """
    folds = folds_of(share)
    products = [sets[first : first + folds] for first in range(0, len(sets), folds)]
    complete = [product for product in products if all(fold.count for fold in product)]
    if not complete:
        raise UserError(
            f"no client has {folds} images of one product, of which some are held out: give a share of variance in"
            f" place of '{LIKELIHOOD}'"
        )
    centres, bases = zip(*(_fitted(product, share, shrinkage) for product in complete), strict=True)
    widest = max(basis.shape[1] for basis in bases)
    padded = [F.pad(basis, (0, widest - basis.shape[1])) for basis in bases]
    directions = torch.stack(padded)
    if length is not None:
        directions *= length / _typical_residual(complete, share, shrinkage)
    return torch.stack(centres), directions


T = TypeVar("T")


def _remembered(
    compute: Callable[[Sequence[Moments], Share, float | None], T],
) -> Callable[[Sequence[Moments], Share, float | None], T]:
    """Keeps what is computed of a product for as long as its moments exist.

    Leaving out images changes the moments of the products that they show: those of all others stay the same object.
    """
    known: WeakKeyDictionary[Moments, tuple[tuple[object, ...], T]] = WeakKeyDictionary()

    @wraps(compute)
    def find(folds: Sequence[Moments], share: Share, shrinkage: float | None) -> T:
        first, *others = folds
        settings = (*others, share, shrinkage)
        if first not in known or known[first][0] != settings:
            known[first] = settings, compute(folds, share, shrinkage)
        return known[first][1]

    return find


_fitted = _remembered(fit_subspace)


@_remembered
def _sums_of_squares(
    folds: Sequence[Moments], share: Share, shrinkage: float | None
) -> tuple[Tensor, Tensor]:
    """Computes the sums of squares of a product's residuals and of its scaled channels, around their means."""
    moments, basis = Moments.union(folds), _fitted(folds, share, shrinkage)[1].double()
    residuals = moments.count * (basis * (moments.covariance @ basis)).sum()
    return residuals, moments.count * moments.scaled(_scale(moments, shrinkage)).variance.sum()


def _typical_residual(products: Sequence[Sequence[Moments]], share: Share, shrinkage: float | None) -> Tensor:
    """Computes the root mean square of residuals, each outside its own product's subspace."""
    sums = zip(*(_sums_of_squares(product, share, shrinkage) for product in products), strict=True)
    total = sum(fold.count for product in products for fold in product)
    mean, spread = (torch.stack(parts).sum() / total for parts in sums)
    if spread <= 0:
        raise UserError("the patches of a product are all alike: give more images of it, or a larger grid")
    # The lower bound is for few patches, which may all lie in a subspace and have no residuals.
    return mean.maximum(_MIN_SHARE * spread).clamp(min=1e-12).sqrt().float()


def residual_basis(moments: Moments, share: float) -> Tensor:
    """Computes an orthonormal basis of the directions in which normal vectors hardly vary.

    Args:
        moments: Moments of the normal vectors.
        share: Smallest share of their variance along all other directions, in (0, 1].

    Returns:
        Directions of the least variance, float32 [C, R]; R is at least 1.
    """
    variances, directions = _directions(moments)
    explained = variances.cumsum(0)
    dimensions = int((explained < share * explained[-1]).sum()) + 1
    return directions[:, min(dimensions, len(variances) - 1) :].float().contiguous()


def likeliest_basis(folds: Sequence[Moments]) -> Tensor:
    """Computes `residual_basis` with the number of dimensions under which held-out vectors are likeliest.

    Each fold in turn is held out, and scored by probabilistic PCA (Tipping and Bishop, 1999, section 3) that is fitted
    to the others. Its log-likelihood depends only on the moments of the held-out fold::

        -n/2 (C log 2 pi + log |M| + tr(M^-1 S))    with S the fold's second moment around the others' mean

    Args:
        folds: Moments of disjoint sets of normal vectors, two or more.

    Returns:
        Directions of the least variance, float32 [C, R].
    """
    total = torch.zeros(len(folds[0].mean) - 1, dtype=torch.float64)
    for held_out, fold in enumerate(folds):
        others = Moments.union([other for number, other in enumerate(folds) if number != held_out])
        total += fold.count * log_likelihoods(others, fold)
    dimensions = int(total.argmax()) + 1
    _, directions = _directions(Moments.union(folds))
    return directions[:, dimensions:].float().contiguous()


def log_likelihoods(fitted: Moments, scored: Moments) -> Tensor:
    """Computes the mean log-likelihood of vectors under probabilistic PCA with 1 to C - 1 dimensions.

    Args:
        fitted: Moments of the vectors that the model is fitted to.
        scored: Moments of the vectors that are scored.

    Returns:
        Log-likelihoods by number of dimensions, float64 [C - 1].
    """
    variances, directions = _directions(fitted)
    channels = len(variances)
    offset = scored.mean - fitted.mean
    second = scored.covariance + torch.outer(offset, offset)
    scored_variances = (directions * (second @ directions)).sum(0)  # second moments along each direction
    variances = variances.clamp(min=1e-9 * variances[0])
    dimensions = torch.arange(1, channels)
    remaining = channels - dimensions
    noise = (variances.sum() - variances.cumsum(0))[:-1] / remaining
    unexplained = (scored_variances.sum() - scored_variances.cumsum(0))[:-1]
    log_determinant = variances.log().cumsum(0)[:-1] + remaining * noise.log()
    trace = (scored_variances / variances).cumsum(0)[:-1] + unexplained / noise
    return -(channels * math.log(2 * math.pi) + log_determinant + trace) / 2


def residual_norms(vectors: Tensor, basis: Tensor) -> Tensor:
    """Computes the lengths [n] of the residuals of centred vectors [n, C] outside the subspace of normal ones.

    Args:
        vectors: Features minus the normal mean.
        basis: Directions outside the subspace [C, R], as `fit_subspace` returns them.
    """
    with full_precision(vectors):  # residuals are differences of large numbers
        return torch.linalg.vector_norm(vectors @ basis, dim=1)


def least_residuals(patches: Tensor, centres: Tensor, bases: Tensor) -> tuple[Tensor, Tensor]:
    """Computes the residuals of patches outside the subspace that fits their image best.

    Args:
        patches: Features [B, P, C].
        centres: Centre of each subspace [N, C].
        bases: Directions outside each subspace [N, C, R], as `fit_subspaces` returns them.

    Returns:
        Lengths of the residuals [B, P], and for each image the subspace with the least mean square residual [B].
    """
    flat = patches.flatten(0, 1).float()
    subspaces = zip(centres, bases, strict=True)
    norms = [residual_norms(flat - centre, basis).view(patches.shape[:2]) for centre, basis in subspaces]
    lengths = torch.stack(norms)
    nearest = lengths.square().mean(2).argmin(0)
    return lengths.gather(0, nearest[None, :, None].expand(1, -1, lengths.shape[2]))[0], nearest


def _directions(moments: Moments) -> tuple[Tensor, Tensor]:
    """Returns variances, descending [C], and directions [C, C], one a column."""
    with one_thread():
        variances, directions = torch.linalg.eigh(moments.covariance)
    return variances.flip(0).clamp(min=0), directions.flip(1)
