"""The judge of reconstructions, which ignores where in an image things lie."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from scipy.stats import binomtest
from torch import Tensor

from lit_fedad.models.backbones import OWN_NAME, create_backbone


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


class Judge:
    """Features without positions, by another backbone than the attacked one.

    It is the library's own; of runs with that backbone, one with random weights.

    Args:
        attacked: Provenance of the run's backbone (``taken``).
    """

    def __init__(self, attacked: Mapping[str, object]) -> None:
        weights = "random" if attacked.get("taken") == "own" else "own"
        self.name = f"{OWN_NAME}, weights {weights}"
        self.backbone = create_backbone(OWN_NAME, (1, 2, 3), weights)

    @torch.no_grad()
    def __call__(self, images: Tensor) -> Tensor:
        """Computes the mean over positions of each feature [n, D].

        Args:
            images: Pixels in [0, 1] [n, ch, H, W], of 1 or 3 channels.
        """
        mean, std = (
            torch.tensor(values).view(-1, 1, 1) for values in (self.backbone.mean, self.backbone.std)
        )
        parts = []
        for part in images.cpu().expand(-1, 3, -1, -1).split(32):
            pyramid = self.backbone((part - mean) / std)
            parts.append(torch.cat([layer.mean((2, 3)) for layer in pyramid], 1))
        return torch.cat(parts)
