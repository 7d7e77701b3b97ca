"""Anomaly detection by densities in a contrastive representation."""

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lit_fedad.contracts import Context, Prediction
from lit_fedad.contracts.compute import map_batches
from lit_fedad.contracts.task import cosine_decay
from lit_fedad.core.bounds import above, at_least, below_one, within
from lit_fedad.core.errors import UserError
from lit_fedad.memory.density import Densities, DensitySet, estimate_densities
from lit_fedad.models.encoders import FrozenEncoder
from lit_fedad.tasks.contrastive_losses import RepresentationLoss
from lit_fedad.tasks.representation import Representation


class Contrastive(Representation):
    """A contrastive representation z = h(f(x)); an image's score is its distance to densities of z.

    This is the task of FADngs. z is normalised to length 1. With other methods, such as FedAvg, a client scores with
    densities of its own images; FADngs replaces these by the densities of all clients.

    Args:
        encoder: See `Representation`.
        loss: Loss of the rounds after the warm-up; None for ``warmup_loss``.
        warmup_loss: Loss of the first rounds.
        warmup: Number of rounds that train ``warmup_loss``.
        rounds: Number of all rounds; after the warm-up the learning rate falls as a cosine.
        clusters: Number K_c of densities per client.
        shrinkage: Shrinkage rho of FADngs Eq. 3.
        score_from: Space in which densities are estimated: the ``projection`` z, as in the paper, or the features f(x)
            of the ``encoder``, scaled to length 1, as in SSD, on whose code the released code builds. ``auto`` is the
            encoder if it is frozen, and the projection otherwise.
        normal_share: Share of a client's images that are predicted normal: delta of FADngs Eq. 8 is this quantile of
            the client's own scores.
        learning_rate: Initial learning rate of SGD.
        final_learning_rate: Final learning rate of SGD.
        momentum: Momentum of SGD.
        weight_decay: Weight decay of SGD.
        **representation: See `Representation`.

    Raises:
        UserError: If a number is out of range, or the loss needs pixels and the encoder is frozen.
    """

    prepares = True
    local_buffers = ("densities.mean", "densities.covariance", "_anomalous")
    scoring_buffers = local_buffers
    free_buffers = ("_anomalous",)
    _anomalous: Tensor

    def __init__(
        self,
        encoder: nn.Module,
        loss: RepresentationLoss | None,
        warmup_loss: RepresentationLoss,
        warmup: int,
        rounds: int,
        clusters: int = 1,
        shrinkage: float = 0.1,
        score_from: Literal["auto", "projection", "encoder"] = "auto",
        normal_share: float = 0.95,
        learning_rate: float = 0.01,
        final_learning_rate: float = 1e-5,
        momentum: float = 0.9,
        weight_decay: float = 1e-4,
        **representation: Any,
    ) -> None:
        super().__init__(encoder, **representation)
        loss = loss or warmup_loss
        frozen = isinstance(encoder, FrozenEncoder)
        at_least("task", 1, clusters=clusters)
        above("task", 0, normal_share=normal_share)
        within("task", 0, 1, shrinkage=shrinkage, normal_share=normal_share)
        at_least(
            "task", 0, warmup=warmup, learning_rate=learning_rate, final_learning_rate=final_learning_rate
        )
        at_least("task", 0, rounds=rounds, weight_decay=weight_decay)
        below_one("task", momentum=momentum)
        if loss.needs_pixels and frozen:
            raise UserError(
                "contrastive_loss=reconstruction decodes pixels, and features are no images: give features=train"
            )
        self.loss, self.warmup_loss = loss, warmup_loss
        self.warmup, self.rounds = warmup, rounds
        if score_from == "auto":
            score_from = "encoder" if frozen else "projection"
        self.score_from = score_from
        self.densities = DensitySet(self.projected if score_from == "projection" else self.num_features)
        self.clusters, self.shrinkage, self.normal_share = clusters, shrinkage, normal_share
        self.learning_rate, self.final_learning_rate = learning_rate, final_learning_rate
        self.momentum, self.weight_decay = momentum, weight_decay
        # Part of the state, so that it is personal to a client and checkpointed.
        self.register_buffer("_anomalous", torch.empty(0, dtype=torch.int64))

    @property
    def decay(self) -> float:
        """The factor of this round's learning rates: 1 in the warm-up, then a cosine from 1 towards 0."""
        return cosine_decay(self.round - self.warmup, self.rounds - self.warmup)

    @property
    def current_loss(self) -> RepresentationLoss:
        """The loss of the warm-up, or of the rounds after it."""
        return self.warmup_loss if self.warming_up else self.loss

    def view(self, batch: Mapping[str, Any]) -> Mapping[str, Any]:
        """Draws the views for this round's loss as one batch of V B images; ``normal`` [B] are predicted normal."""
        normal = ~torch.isin(batch["index"], self._anomalous.to(batch["index"].device))
        return {**super().view(batch), "normal": normal}

    def represent(self, features: Tensor) -> Tensor:
        """Computes the vectors [B, D] whose densities are estimated: z, or features f(x) scaled to length 1."""
        if self.score_from == "projection":
            return self.project(features)
        return F.normalize(features.float(), dim=1)

    def objective(self, features: Tensor, batch: Mapping[str, Any]) -> dict[str, Tensor]:
        """Computes the loss of this round."""
        views = batch["views"]
        return self.current_loss(self.projection(features).view(*views.shape[:2], -1), batch)

    def predict(self, features: Tensor, batch: Mapping[str, Any]) -> Prediction:
        """Computes each image's squared Mahalanobis distance to the nearest density (FADngs Eq. 6)."""
        return Prediction(image_score=self.densities(self.represent(features)))

    def refresh(self, loader: DataLoader, context: Context, first: bool = False) -> None:
        """Estimates the client's own densities, and predicts which of its images are normal."""
        z, index = self.embed(loader)
        densities = self.estimate(z, context)
        self.densities.set(densities.mean, densities.covariance)
        self.select(z, index)

    @torch.no_grad()
    def embed(self, loader: DataLoader) -> tuple[Tensor, Tensor]:
        """Computes `represent` of all images without augmentation [n, D], and their positions in the data set [n]."""

        def embedded(batch: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
            return self.represent(self({**batch, "image": self.images_of(batch)})), batch["index"].cpu()

        z, index = (torch.cat(parts) for parts in zip(*map_batches(self, loader, embedded), strict=True))
        return z, index

    def estimate(self, z: Tensor, context: Context) -> Densities:
        """Estimates densities of embedded images (FADngs Eq. 1, FADngs Eq. 2 and FADngs Eq. 3)."""
        return estimate_densities(z.cpu(), self.clusters, self.shrinkage, context.generator("clusters"))

    def select(self, z: Tensor, index: Tensor) -> None:
        """Predicts which images are anomalous: those above delta (FADngs Eq. 8).

        Args:
            z: Embedded images of one client [n, D].
            index: Their positions in the data set [n].
        """
        if not len(self.densities):
            self._anomalous = index[:0]
            return
        scores = self.densities(z.to(self.device)).double().cpu()
        self._anomalous = index[scores > torch.quantile(scores, self.normal_share)]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Builds SGD with momentum, at this round's learning rate."""
        span = self.learning_rate - self.final_learning_rate
        return torch.optim.SGD(
            self.parameters(),
            lr=self.final_learning_rate + span * self.decay,
            momentum=self.momentum,
            weight_decay=self.weight_decay,
        )
