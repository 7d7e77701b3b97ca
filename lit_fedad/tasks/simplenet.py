"""SimpleNet: a discriminator tells adapted features of normal patches from noisy ones (Liu et al., CVPR 2023)."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lit_fedad.contracts import Prediction
from lit_fedad.core.bounds import above, at_least
from lit_fedad.models.backbones import FeaturePyramid
from lit_fedad.tasks.patches import PatchTask


class SimpleNet(PatchTask):
    """Frozen patch features, a linear adaptor, and a discriminator whose output is high for normal patches.

    ``L = mean max(0, t - D(q)) + mean max(0, t + D(q + e))``, with adapted features q, noise e from N(0, s^2), and
    ``t = margin`` (from SimpleNet Eq. 6 on). The score of a patch is ``-D(q)``. Where the authors' code differs, this
    follows the paper: Adam trains the adaptor too, there AdamW with a decay of 0.01; and the score of an image is the
    peak of its map, there the highest patch.

    Args:
        backbone: Frozen feature extractor.
        noise: Standard deviation s, in units of the features, standardised or not. The authors' 0.015 is meant for
            features of a wide ResNet that are not standardised; for others it may be too small to have an effect.
        margin: Margin t of both hinges.
        hidden: Hidden units of the discriminator.
        adaptor_rate: Learning rate of the adaptor.
        learning_rate: Learning rate of the discriminator.
        weight_decay: Weight decay of both.
        **patches: See `PatchTask`.

    Raises:
        UserError: If a number is out of range.
    """

    output_modules = ("discriminator",)

    def __init__(
        self,
        backbone: FeaturePyramid,
        noise: float = 0.25,
        margin: float = 0.5,
        hidden: int = 1024,
        adaptor_rate: float = 1e-4,
        learning_rate: float = 2e-4,
        weight_decay: float = 1e-5,
        **patches: Any,
    ) -> None:
        super().__init__(backbone, **patches)
        above("task", 0, noise=noise, learning_rate=learning_rate)
        at_least("task", 0, margin=margin, adaptor_rate=adaptor_rate, weight_decay=weight_decay)
        at_least("task", 1, hidden=hidden)
        self.noise, self.margin = noise, margin
        self.rates, self.weight_decay = (adaptor_rate, learning_rate), weight_decay
        self.adaptor = nn.Linear(self.channels, self.channels)
        self.discriminator = nn.Sequential(
            nn.Linear(self.channels, hidden),
            nn.BatchNorm1d(hidden),
            nn.LeakyReLU(0.2),
            nn.Linear(hidden, 1, bias=False),
        )
        for layer in (self.adaptor, self.discriminator[0], self.discriminator[3]):
            nn.init.xavier_normal_(layer.weight)  # type: ignore[arg-type]

    @torch.no_grad()
    def view(self, batch: Mapping[str, Any]) -> dict[str, Tensor]:
        """Computes frozen features ``patches`` [B, P, C], only once for all users of the view."""
        return {"patches": self.standardised(self.embed(batch))}

    def forward(self, batch: Mapping[str, Any]) -> Tensor:
        """Computes adapted features [B, P, C] of a view or a batch."""
        patches: Tensor = (batch if "patches" in batch else self.view(batch))["patches"]
        return self.adaptor(patches)

    def outputs(self, features: Tensor) -> Tensor:
        """Computes D of adapted features [B, P, C], as one row [B * P]."""
        return self.discriminator(features.flatten(0, 1))[:, 0].float()

    def objective(self, features: Tensor, batch: Mapping[str, Any]) -> dict[str, Tensor]:
        """Computes the truncated L1 loss of features without and with noise; one batch normalisation has both."""
        noisy = features + self.noise * torch.randn_like(features)
        normal, anomalous = self.outputs(torch.cat([features, noisy])).chunk(2)
        loss = (self.margin - normal).relu().mean() + (self.margin + anomalous).relu().mean()
        return {"loss": loss}

    def predict(self, features: Tensor, batch: Mapping[str, Any]) -> Prediction:
        """Computes a smoothed map of ``-D``, and its peak."""
        scores = -self.outputs(features)
        return Prediction(image_score=self.judge(scores), anomaly_map=self.draw(scores))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Builds Adam, with one learning rate for the adaptor, and one for the discriminator and a method's weights."""
        adaptor = list(self.adaptor.parameters())
        others = [weight for weight in self.trainable if all(weight is not own for own in adaptor)]
        rated = zip((adaptor, others), self.rates, strict=True)
        groups = [{"params": weights, "lr": rate} for weights, rate in rated]
        return torch.optim.Adam(groups, weight_decay=self.weight_decay)
