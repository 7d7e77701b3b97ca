"""How numbers of several clients become one, whatever the method."""

from collections.abc import Sequence

import torch
from torch import Tensor


def pool_moments(counts: Tensor, means: Tensor, variances: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance of the union of several sets, from each set's own.

    Args:
        counts: Set sizes [N].
        means: Means [N, C].
        variances: Variances, divided by the set size [N, C].

    Returns:
        Mean and variance of the union, both [C].

    Example:
        >>> pool_moments(torch.tensor([1.0, 1.0]), torch.tensor([[0.0], [2.0]]), torch.zeros(2, 1))
        (tensor([1.]), tensor([1.]))
    """
    share = (counts.double() / counts.double().sum())[:, None]
    mean = (share * means.double()).sum(0)
    variance = (share * (variances.double() + (means.double() - mean) ** 2)).sum(0)
    return mean.to(means.dtype), variance.to(variances.dtype)


def pool_quantile(sketches: Sequence[Tensor], counts: Sequence[float], level: float) -> float:
    """A quantile of the union of several sets, from equally spaced quantiles of each.

    Args:
        sketches: Per set, its quantiles at equally spaced levels, ascending.
        counts: Set sizes.
        level: The quantile asked for, in [0, 1].

    Returns:
        The smallest value that at least `level` of the union's mass does not exceed, up to the sketches' spacing.
    """
    values = torch.cat([sketch.double() for sketch in sketches])
    weights = torch.cat(
        [
            torch.full_like(s, count / len(s), dtype=torch.float64)
            for s, count in zip(sketches, counts, strict=True)
        ]
    )
    values, order = values.sort()
    mass = weights[order].cumsum(0)
    return float(values[torch.searchsorted(mass, level * mass[-1]).clamp(max=len(values) - 1)])
