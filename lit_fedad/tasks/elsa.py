"""ELSA: a contrastive representation fine-tuned towards prototypes, scored by their energy (Han et al., BMVC 2021)."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lit_fedad.contracts import Context, Prediction
from lit_fedad.contracts.compute import full_precision, map_batches
from lit_fedad.core.bounds import above, at_least, below_one
from lit_fedad.core.errors import UserError
from lit_fedad.memory.kmeans import KMeansResult, kmeans
from lit_fedad.models.contrastive_views import ContrastiveViews
from lit_fedad.tasks.contrastive_losses import RepresentationLoss
from lit_fedad.tasks.representation import Representation

STEPS = 10
"""Steps of the k-means by which clients and server find prototypes."""

_FEASIBLE = 0.1
"""Smallest temperature for which a number of prototypes is advised: 22,027."""


class Elsa(Representation):
    """Energy-based learning for semi-supervised anomaly detection (arXiv 2103.15296), without labelled anomalies.

    z = h(f(x)) has length 1. After a warm-up by SimCLR the loss is the mean of ``1 / E(x)`` over two views of each
    image, with ``E(x) = log sum_p exp(z . p / tau)`` over prototypes p, spherical k-means centres of normal images. The
    score is ``-log mean_p exp(z . p - 1)``: minus the energy without the temperature, as in the released code, plus a
    constant that makes it 0 where z equals all prototypes. Energies of images differ so little that without it nearly
    all scores would fall into one bin (`LogBins`), and decisions could not tell images apart.

    Views after the warm-up are crops of a fixed share of the area (``finetuning_views``), as in the released code;
    frozen features keep the views of the warm-up, which are computed once. The released code computes prototypes anew
    every third epoch, stops early by a synthetic validation set, and scores one random view. Here prototypes are
    computed anew whenever a client receives weights, all rounds are trained, and images are scored as they are.

    The prototypes are a buffer, which the method of the same name shares; with other methods each client has its own.

    Args:
        encoder: See `Representation`.
        warmup_loss: Loss of the first rounds, SimCLR.
        warmup: Number of rounds that train ``warmup_loss``.
        finetuning_views: Draws augmented images after the warm-up.
        prototypes: Number of prototypes.
        temperature: Temperature tau.
        learning_rate: Learning rate of SGD in the warm-up.
        momentum: Momentum of SGD.
        weight_decay: Weight decay of SGD.
        finetuning_rate: Learning rate of Adam after the warm-up.
        **representation: See `Representation`.

    Raises:
        UserError: If a number is out of range, or prototypes are so few that E can fall to 0.
    """

    prepares = True
    local_buffers = ("prototypes",)
    scoring_buffers = local_buffers
    prototypes: Tensor

    def __init__(
        self,
        encoder: nn.Module,
        warmup_loss: RepresentationLoss,
        warmup: int,
        finetuning_views: ContrastiveViews,
        prototypes: int = 50,
        temperature: float = 0.5,
        learning_rate: float = 0.01,
        momentum: float = 0.9,
        weight_decay: float = 1e-4,
        finetuning_rate: float = 1e-4,
        **representation: Any,
    ) -> None:
        super().__init__(encoder, **representation)
        above("task", 0, temperature=temperature)
        at_least("task", 1, prototypes=prototypes)
        at_least("task", 0, warmup=warmup, learning_rate=learning_rate)
        at_least("task", 0, weight_decay=weight_decay, finetuning_rate=finetuning_rate)
        below_one("task", momentum=momentum)
        if math.log(prototypes) <= 1 / temperature:
            advice = "a higher temperature"  # it would take more prototypes than memory or a float holds
            if temperature >= _FEASIBLE:
                advice = f"task.prototypes={math.floor(math.exp(1 / temperature)) + 1} or more"
            raise UserError(
                f"task.prototypes={prototypes}: at task.temperature={temperature} the loss 1 / E has a pole; give"
                f" {advice}"
            )
        self.warmup_loss, self.warmup, self.temperature = warmup_loss, warmup, temperature
        self.finetuning_draw = finetuning_views
        self.learning_rate, self.momentum, self.weight_decay = learning_rate, momentum, weight_decay
        self.finetuning_rate = finetuning_rate
        self.register_buffer("prototypes", torch.zeros(prototypes, self.projected))

    @property
    def current_loss(self) -> RepresentationLoss:
        """SimCLR; the energy loss takes the same two views."""
        return self.warmup_loss

    def draw_views(self, images: Tensor) -> Tensor:
        """Draws two views of each image [2, B, 3, S, S], after the warm-up by ``finetuning_views``."""
        draw = self.draw if self.warming_up else self.finetuning_draw
        return self.current_loss.views(images, draw)

    def cosines(self, features: Tensor) -> Tensor:
        """Computes the cosines ``z . p`` of images and prototypes [B, P]."""
        z = self.project(features)
        with full_precision(z):  # cosines of images differ only in their last digits
            return z @ self.prototypes.T

    def objective(self, features: Tensor, batch: Mapping[str, Any]) -> dict[str, Tensor]:
        """Computes the loss of this round."""
        if self.warming_up:
            return self.warmup_loss(self.projection(features).view(*batch["views"].shape[:2], -1), batch)
        energies = (self.cosines(features) / self.temperature).logsumexp(1)
        return {"loss": energies.reciprocal().mean()}

    def predict(self, features: Tensor, batch: Mapping[str, Any]) -> Prediction:
        """Scores images by how far their energy without the temperature lies below its largest value."""
        return Prediction(image_score=-(self.cosines(features) - 1).exp().mean(1).log())

    @torch.no_grad()
    def cluster(self, loader: DataLoader, context: Context) -> KMeansResult:
        """Clusters z of local images, without augmentation."""
        z = torch.cat([self.project(features).cpu() for features in map_batches(self, loader, self)])
        generator, prototypes = context.generator("prototypes"), len(self.prototypes)
        return kmeans(z, prototypes, generator=generator, max_steps=STEPS, tolerance=0, spherical=True)

    def refresh(self, loader: DataLoader, context: Context, first: bool = False) -> None:
        """Computes the prototypes of local images under the current weights."""
        self.prototypes = self.cluster(loader, context).centroids.to(self.prototypes)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Builds SGD in the warm-up, and Adam after it."""
        if self.warming_up:
            return torch.optim.SGD(
                self.trainable, lr=self.learning_rate, momentum=self.momentum, weight_decay=self.weight_decay
            )
        return torch.optim.Adam(self.trainable, lr=self.finetuning_rate)
