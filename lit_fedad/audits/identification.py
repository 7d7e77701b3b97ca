"""The judge of reconstructions, which ignores where in an image things lie."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from scipy.stats import binomtest
from torch import Tensor

from lit_fedad.audits.inversion_attack import pixels, private_images
from lit_fedad.experiment.finished_run import FinishedRun
from lit_fedad.models.backbones import OWN_NAME, create_backbone

_CANDIDATES = 200  # images of other clients that the judge compares with, at most


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


class Jury:
    """A judge, and the candidates that it tells apart: the attacked client's images, and those of others.

    The judge is the library's own backbone; of runs with that backbone, one with random weights. Its features are means
    over positions.

    Args:
        run: The run.
        client: The attacked client.

    Attributes:
        name: The judge.
        own: Features of the client's images [m, D].
        others: Features of images of others [k, D], of the classes that the client holds, else of any.
        candidates: What is compared, in words.
    """

    def __init__(self, run: FinishedRun, client: int) -> None:
        weights = "random" if run.model.provenance.get("taken") == "own" else "own"
        self.name = f"{OWN_NAME}, weights {weights}"
        self.backbone = create_backbone(OWN_NAME, (1, 2, 3), weights)
        clients, classes = run.data.partition.clients, [sample.category for sample in run.data.images.train]
        held = {classes[index] for index in clients[client]}
        others = [index for number, own in enumerate(clients) if number != client for index in own]
        alike = [index for index in others if classes[index] in held]
        chosen = (alike or others)[:: max(1, len(alike or others) // _CANDIDATES)][:_CANDIDATES]
        self.own, self.others = self.features(private_images(run, client)), self.features(pixels(run, chosen))
        kinds = "of its classes" if alike else "of other classes, which alone may tell them apart"
        self.candidates = f"{len(self.own)} of the client and {len(self.others)} of others, {kinds}"

    @torch.no_grad()
    def features(self, images: Tensor) -> Tensor:
        """Computes features [n, D] of pixels in [0, 1] [n, ch, H, W], of 1 or 3 channels."""
        mean, std = (torch.tensor(by).view(-1, 1, 1) for by in (self.backbone.mean, self.backbone.std))
        parts = []
        for part in images.cpu().expand(-1, 3, -1, -1).split(32):
            pyramid = self.backbone((part - mean) / std)
            parts.append(torch.cat([layer.mean((2, 3)) for layer in pyramid], 1))
        return torch.cat(parts)

    def identify(self, images: Tensor, true: Tensor | None = None) -> dict[str, Any]:
        """Ranks true images, all of the client's by default, among the candidates of others (`Identified`)."""
        own = self.own if true is None else self.features(true)
        found = identify(self.features(images), own, self.others)
        return {**found._asdict(), "ranks": found.ranks.tolist()}
