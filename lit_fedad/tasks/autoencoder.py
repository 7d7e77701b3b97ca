"""Anomaly detection by the reconstruction error of an autoencoder of normal images."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lit_fedad.contracts import Prediction, Task
from lit_fedad.errors import UserError
from lit_fedad.guards.bounds import at_least
from lit_fedad.models.anomaly_map import AnomalyMap


class Autoencoder(Task):
    """An autoencoder that scores an image by its mean squared reconstruction error.

    The baseline "AE" of FADngs Table I. Images are normalised and reconstructions lie in [0, 1]: errors are computed in
    [0, 1], where all channels have equal weight.

    Args:
        encoder: Maps images [B, 3, S, S] to latent vectors [B, C], with C as its attribute ``num_features``.
        decoder: Builds the decoder to images in [0, 1], given C and S.
        image_size: Side S of the images in pixels.
        mean: Channel means by which images were normalised.
        std: Channel standard deviations by which images were normalised.
        learning_rate: Learning rate of Adam.
        sigma: Standard deviation of the Gaussian smoothing of the anomaly map, in pixels.
    """

    output_modules = ("decoder",)
    mean: Tensor
    std: Tensor

    def __init__(
        self,
        encoder: nn.Module,
        decoder: Callable[[int, int], nn.Module],
        image_size: int,
        mean: Sequence[float],
        std: Sequence[float],
        learning_rate: float = 1e-3,
        sigma: float = 4.0,
    ) -> None:
        super().__init__()
        at_least("task", 0, learning_rate=learning_rate)
        self.encoder = encoder
        self.num_features: int = encoder.num_features  # type: ignore[assignment]
        self.decoder = decoder(self.num_features, image_size)
        self.learning_rate = learning_rate
        self.draw_map = AnomalyMap(image_size, image_size, sigma)
        self.register_buffer("mean", torch.tensor(mean).view(-1, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(std).view(-1, 1, 1), persistent=False)

    def forward(self, batch: Mapping[str, Any]) -> Tensor:
        """Computes latent vectors [B, C].

        Raises:
            UserError: If the batch holds cached features instead of images.
        """
        if "image" not in batch:
            raise UserError("task autoencoder needs images, not cached features; set cache.enabled=false")
        return self.encoder(batch["image"])

    def errors(self, features: Tensor, batch: Mapping[str, Any]) -> Tensor:
        """Computes squared errors, averaged over the channels [B, S, S]."""
        images = batch["image"] * self.std + self.mean
        return (self.decoder(features) - images).square().mean(1)

    def objective(self, features: Tensor, batch: Mapping[str, Any]) -> dict[str, Tensor]:
        """Computes the mean squared error as ``loss``."""
        return {"loss": self.errors(features, batch).mean()}

    def predict(self, features: Tensor, batch: Mapping[str, Any]) -> Prediction:
        """Computes each image's mean squared error, and a smoothed map of the errors."""
        errors = self.errors(features, batch)
        return Prediction(image_score=errors.flatten(1).mean(1), anomaly_map=self.draw_map(errors))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Builds Adam."""
        return torch.optim.Adam(self.parameters(), lr=self.learning_rate)
