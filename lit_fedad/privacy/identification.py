"""Whether a reconstruction points at the client whose image it should be, wherever in the image things lie."""

from __future__ import annotations

from typing import NamedTuple

import torch
from scipy.stats import binomtest
from torch import Tensor


class Identified(NamedTuple):
    """How near reconstructions come to the true images, among all candidates.

    Attributes:
        ranks: Rank of the nearest true image of each reconstruction among the candidates, 1 for the nearest, int64 [n].
        top1: Share of the reconstructions whose nearest candidate is a true image.
        low: Lower end of its exact binomial 95 % interval.
        high: Upper end.
        chance: Share of true images among the candidates.
    """

    ranks: Tensor
    top1: float
    low: float
    high: float
    chance: float


def identify(reconstructed: Tensor, true: Tensor, others: Tensor) -> Identified:
    """Ranks candidates by their distance to each reconstruction (Euclidean, features divided by their deviation).

    Args:
        reconstructed: Features of reconstructions [n, D].
        true: Features of the images that they may show [m, D].
        others: Features of other images [k, D].

    Example:
        >>> true, others = torch.tensor([[0.0, 1.0]]), torch.tensor([[4.0, 1.0], [8.0, 3.0]])
        >>> found = identify(torch.tensor([[1.0, 1.0], [5.0, 1.0]]), true, others)
        >>> found.ranks.tolist(), found.top1, round(found.chance, 2)
        ([1, 2], 0.5, 0.33)
    """
    candidates = torch.cat([true, others]).double()
    scale = candidates.std(0, correction=0).clamp(min=1e-9)
    gaps = torch.cdist(
        reconstructed.double() / scale, candidates / scale, compute_mode="donot_use_mm_for_euclid_dist"
    )
    nearest = gaps[:, : len(true)].amin(1, keepdim=True)
    ranks = 1 + (gaps[:, len(true) :] < nearest).sum(1)
    hits = int((ranks == 1).sum())
    interval = binomtest(hits, len(ranks)).proportion_ci(0.95)
    return Identified(
        ranks, hits / len(ranks), float(interval.low), float(interval.high), len(true) / len(candidates)
    )
