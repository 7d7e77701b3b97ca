"""Distance correlation between shared Gaussian densities and the raw data behind them (FADngs, Section IV-D).

The plain coefficient R is biased upwards, and in high dimension grossly so: for a fixed number of points it tends
to 1 as the dimension grows, even between independent samples. 100 pairs of independent Gaussian vectors of 128
dimensions have R of about 0.91; 2,000 pairs of 128 dimensions and 3,072 of 0.65. Fig. 9 of FADngs, with 0.63 to
0.66 between raw data and shared densities and between raw data and noise alike, lies within that bias. The
bias-corrected estimate is near 0 for independent samples of any dimension, so it is the one to judge by.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lit_fedad.errors import UserError

# Centred distances below this share of the distances themselves are rounding, not spread.
_ROUNDING = 1e-12


class DensityPrivacy(NamedTuple):
    """Distance correlations between raw data, samples of the shared densities and plain noise.

    Attributes:
        names: Names of the k rows and columns.
        r_squared: Plain R^2 [k, k]; FADngs Eq. 18 states the square, not R.
        r: Plain R [k, k].
        corrected: Bias-corrected R^2 [k, k], may be negative.
    """

    names: tuple[str, ...]
    r_squared: Tensor
    r: Tensor
    corrected: Tensor


def density_privacy(
    means: Tensor, covariances: Tensor, raw: Sequence[Tensor], generator: torch.Generator
) -> DensityPrivacy:
    """Measures the dependence of shared densities, and of noise, on the raw data (FADngs, Fig. 9).

    As many points are drawn from each density as there are raw samples behind it, and paired with them in their
    order. Beside them stand three samples of noise of the same dimension: Gaussian 1 with mean 1 and variance
    10, Gaussian 2 with mean 0 and variance 1, and uniform in [0, 1]. Distance correlation knows neither shift
    nor scale, so the two Gaussians differ by the draw alone.

    Args:
        means: Means of the densities [M, D].
        covariances: Their covariances [M, D, D].
        raw: The raw samples behind each density, M times [n_k, ...]; n in total, memory is O(n^2).
        generator: Source of all random draws.

    Returns:
        Correlations of raw data, shared densities, Gaussian 1, Gaussian 2 and uniform noise, float64 [5, 5].

    Raises:
        UserError: Not one set of raw samples a density, or fewer than 4 raw samples.
    """
    if len(raw) != len(means):
        raise UserError(f"{len(means)} densities but {len(raw)} sets of raw samples; pass one set a density")
    # Eigenvectors instead of a Cholesky factor: a density of few samples may be singular.
    variances, axes = torch.linalg.eigh(covariances.double())
    roots = axes * variances.clamp(min=0).sqrt().unsqueeze(-2)
    counts = torch.tensor([len(samples) for samples in raw])
    shape = (int(counts.sum()), means.shape[1])

    def normal() -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    shared = torch.cat(
        [
            mean + noise @ root.T
            for mean, root, noise in zip(means.double(), roots, normal().split(counts.tolist()), strict=True)
        ]
    )
    samples = {
        "raw data": torch.cat([part.flatten(1) for part in raw]),
        "shared densities": shared,
        "Gaussian 1": 1 + 10**0.5 * normal(),
        "Gaussian 2": normal(),
        "uniform": torch.rand(shape, generator=generator, dtype=torch.float64),
    }
    plain = distance_correlation_matrix(list(samples.values()))
    corrected = distance_correlation_matrix(list(samples.values()), corrected=True)
    return DensityPrivacy(tuple(samples), plain, plain.sqrt(), corrected)


def distance_correlation_matrix(samples: Sequence[Tensor], corrected: bool = False) -> Tensor:
    """Computes the squared distance correlation R^2 of every pair of paired samples.

    Source: Székely, Rizzo and Bakirov, Annals of Statistics 35(6), 2007; FADngs Eq. 18, FADngs Eq. 19.

    Args:
        samples: k samples [n, p_k], n >= 4; rows of the same index belong together.
        corrected: Whether to remove the bias (Székely and Rizzo, 2013, 2014).

    Returns:
        float64 [k, k], symmetrical, with 1 on the diagonal. Plain, R^2 lies in [0, 1]. Corrected, it is about 0 for
        independent samples and may be negative. A sample without spread gives 0, by convention.

    Raises:
        UserError: The samples differ in length, or have fewer than 4 rows.

    Examples:
        >>> x = torch.arange(5.0).unsqueeze(1)
        >>> round(distance_correlation_matrix([x, -3 * x + 1])[0, 1].item(), 6)
        1.0
        >>> noise = torch.randn(2, 100, 128, generator=torch.Generator().manual_seed(0))
        >>> plain, corrected = (distance_correlation_matrix(noise, each)[0, 1].item() for each in (False, True))
        >>> round(plain, 1), abs(corrected) < 0.1
        (0.8, True)
    """
    lengths = [len(sample) for sample in samples]
    if len(set(lengths)) > 1:
        raise UserError(f"samples of {lengths} rows for a distance correlation; pass as many of each")
    if lengths[0] < 4:
        raise UserError(f"distance correlation of {lengths[0]} pairs; pass at least 4")
    centred = torch.stack([_centred_distances(sample, corrected).flatten() for sample in samples])
    covariances = centred @ centred.T  # the factor 1/n^2, or 1/(n (n - 3)), cancels below
    deviations = covariances.diagonal().sqrt()
    product = deviations.outer(deviations)
    correlations = torch.where(product > 0, covariances / product, 0)
    return correlations.clamp(-1 if corrected else 0, 1)  # bounds that hold up to rounding


def _centred_distances(sample: Tensor, corrected: bool) -> Tensor:
    """Double-centred Euclidean distances within a sample [n, n]; U-centred where corrected."""
    points = sample.double()
    points = points - points[0]  # a common offset would cost digits of the distances
    distances = torch.cdist(points, points).fill_diagonal_(0)
    n = len(points)
    rows = distances.sum(0) / (n - 2 if corrected else n)
    total = distances.sum() / ((n - 1) * (n - 2) if corrected else n**2)
    centred = distances - rows - rows.unsqueeze(1) + total
    if corrected:
        centred.fill_diagonal_(0)
    if centred.norm() <= _ROUNDING * distances.norm():
        centred.zero_()
    return centred
