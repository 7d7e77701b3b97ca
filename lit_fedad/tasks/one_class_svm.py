"""AE-1SVM: an autoencoder and a one-class SVM on random Fourier features of its bottleneck (Nguyen and Vien, 2018)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lit_fedad.contracts import Prediction
from lit_fedad.guards.bounds import above, at_least, within
from lit_fedad.tasks.bottleneck import Bottleneck


class OneClassSVM(Bottleneck):
    """A one-class SVM in the bottleneck of an autoencoder, trained together (arXiv 1804.04888).

    The loss is ``alpha mean |x - x^|^2 + |w|^2 / 2 - rho + mean max(0, rho - w . phi(z)) / nu``, with random Fourier
    features ``phi(z) = [cos W z, sin W z] / sqrt(R)`` of a Gaussian kernel; W comes from N(0, 1 / sigma^2), is drawn
    with the initial weights, the same for all clients, and stays. The score is ``rho - w . phi(z)``. The released code
    counts the last term of the loss twice.

    Args:
        encoder: See `Bottleneck`, also for the other arguments that are not listed here.
        alpha: Weight of the reconstruction.
        nu: Share of training images that may lie on the wrong side.
        sigma: Width of the kernel, for z as it comes.
        fourier: Number R of random directions.

    Raises:
        UserError: If a number is out of range.
    """

    directions: Tensor

    def __init__(
        self,
        encoder: nn.Module,
        decoder: Callable[[int, int], nn.Module],
        image_size: int,
        mean: Sequence[float],
        std: Sequence[float],
        width: int = 128,
        hidden: int = 256,
        alpha: float = 10.0,
        nu: float = 0.1,
        sigma: float = 3.0,
        fourier: int = 500,
        learning_rate: float = 1e-3,
    ) -> None:
        super().__init__(encoder, decoder, image_size, mean, std, width, hidden, learning_rate=learning_rate)
        at_least("task", 0, alpha=alpha)
        at_least("task", 1, fourier=fourier)
        above("task", 0, sigma=sigma, nu=nu)
        within("task", 0, 1, nu=nu)
        self.alpha, self.nu = alpha, nu
        self.register_buffer("directions", torch.randn(fourier, width) / sigma, persistent=False)
        self.normal = nn.Parameter(torch.randn(2 * fourier) / (2 * fourier) ** 0.5)
        self.rho = nn.Parameter(torch.zeros(()))

    def fourier(self, features: Tensor) -> Tensor:
        """Computes phi(z) [B, 2 R], of length 1."""
        turned = features @ self.directions.T
        return torch.cat([turned.cos(), turned.sin()], 1) / len(self.directions) ** 0.5

    def margins(self, features: Tensor) -> Tensor:
        """Computes ``rho - w . phi(z)`` [B], above 0 outside."""
        return self.rho - self.fourier(features) @ self.normal

    def objective(self, features: Tensor, batch: Mapping[str, Any]) -> dict[str, Tensor]:
        """Computes the loss, and the ``reconstruction`` in it."""
        reconstruction = self.errors(features, batch).mean()
        hinge = self.margins(features).relu().mean() / self.nu
        loss = self.alpha * reconstruction + self.normal.square().sum() / 2 - self.rho + hinge
        return {"loss": loss, "reconstruction": reconstruction}

    def predict(self, features: Tensor, batch: Mapping[str, Any]) -> Prediction:
        """Scores images by how far they lie outside."""
        return Prediction(image_score=self.margins(features))
