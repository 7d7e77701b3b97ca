"""Aggregation of the tensors of several clients: means, pooled moments and pooled quantiles, for any method."""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from lit_fedad.contracts import Message, Update
from lit_fedad.contracts.message import LARGEST
from lit_fedad.contracts.task import channel_scale

STATISTICS = ("count", "mean", "variance")
"""Names of the channel statistics that a client sends."""


def weighted_mean(updates: Mapping[int, Update], equal: bool = False) -> Message:
    """Averages messages entry by entry, weighted by data size (FedAvg): ``sum_n z_n W_n``.

    Floating-point entries are summed in double precision and divided last, so that the mean of equal messages is the
    message itself and the order of clients does not matter. Integer entries (a BatchNorm's count of batches) cannot be
    averaged; they are taken from the client with most data, and 64-bit ones are limited to half of `LARGEST`.

    Args:
        updates: Updates by client; all with the same keys and shapes.
        equal: Whether every client has the same weight, whatever its data size.

    Returns:
        The mean, in the type of the messages.

    Example:
        >>> one, other = {"w": torch.tensor([0.0])}, {"w": torch.tensor([4.0])}
        >>> weighted_mean({0: Update(one, 30), 1: Update(other, 10)})
        {'w': tensor([1.])}
    """
    sizes = {client: 1 if equal else update.num_samples for client, update in updates.items()}
    # Sizes are divided by their greatest common divisor: clients of equal size get weight 1, exactly as with `equal`.
    divisor = math.gcd(*sizes.values()) or 1
    total = sum(sizes.values()) / divisor
    largest = updates[max(sizes, key=lambda client: updates[client].num_samples)].message
    merged = {}
    for name, entry in largest.items():
        if not entry.is_floating_point():
            # Clients go on counting from this value, so it must stay well below the declared bound.
            merged[name] = entry.clamp(max=int(LARGEST) // 2) if entry.dtype == torch.int64 else entry.clone()
            continue
        mean = torch.zeros_like(entry, dtype=torch.float64)
        for client, update in updates.items():
            mean.add_(update.message[name], alpha=sizes[client] / divisor)
        merged[name] = (mean / total).to(entry.dtype)
    return merged


def mean_scalars(scalars: Mapping[int, Mapping[str, float]], sizes: Mapping[int, int]) -> dict[str, float]:
    """Averages the clients' scalars by name, weighted by their numbers of images.

    Args:
        scalars: Scalars by client and name; the mean of a name is taken over the clients that report it.
        sizes: Number of training images by client.
    """
    means = {}
    for name in dict.fromkeys(name for named in scalars.values() for name in named):
        values = {client: named[name] for client, named in scalars.items() if name in named}
        total = sum(sizes[client] for client in values)
        means[name] = sum(sizes[client] * value for client, value in values.items()) / total
    return means


def pool_moments(counts: Tensor, means: Tensor, variances: Tensor) -> tuple[Tensor, Tensor]:
    """Computes mean and variance of the union of several sets from the mean and variance of each set.

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


def pool_statistics(updates: Mapping[int, Update], shrinkage: float) -> Message:
    """Computes the mean and scale with which features are standardised.

    Args:
        updates: ``count``, ``mean`` [C] and ``variance`` [C] by client.
        shrinkage: See `channel_scale`.

    Returns:
        ``mean`` [C] and ``scale`` [C]; the scale is a standard deviation that `channel_scale` keeps above zero.
    """
    messages = [update.message for update in updates.values()]
    mean, variance = pool_moments(*(torch.stack([m[k] for m in messages]) for k in STATISTICS))
    return {"mean": mean, "scale": channel_scale(variance, shrinkage)}


def pool_quantile(sketches: Sequence[Tensor], counts: Sequence[float], level: float) -> float:
    """Estimates a quantile of the union of several sets from equally spaced quantiles of each set.

    Args:
        sketches: Quantiles of each set at equally spaced levels, ascending.
        counts: Set sizes.
        level: Level of the quantile, in [0, 1].

    Returns:
        The smallest value v such that at least a share `level` of the union is at most v, as precisely as the spacing
        of the sketches allows.
    """
    values = torch.cat([sketch.double() for sketch in sketches])
    weights = torch.cat(
        [
            torch.full_like(s, count / len(s), dtype=torch.float64)
            for s, count in zip(sketches, counts, strict=True)
        ]
    )
    return weighted_quantile(values, weights, level)


def weighted_quantile(values: Tensor, weights: Tensor, level: float) -> float:
    """Returns the smallest of the values [n] such that values up to it have at least a share `level` of the weight.

    Args:
        values: Values [n]; n is at least 1.
        weights: Their weights [n].
        level: Share of the total weight, in [0, 1].
    """
    values, order = values.sort()
    mass = weights[order].cumsum(0)
    return float(values[torch.searchsorted(mass, level * mass[-1]).clamp(max=len(values) - 1)])
