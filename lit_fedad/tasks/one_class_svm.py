"""AE-1SVM: a one-class SVM in the bottleneck of an autoencoder (Nguyen and Vien, ECML-PKDD 2018)."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lit_fedad.contracts import Prediction
from lit_fedad.contracts.compute import full_precision
from lit_fedad.core.bounds import above, at_least, within
from lit_fedad.tasks.deep_svdd import Bottleneck


class OneClassSVM(Bottleneck):
    """A one-class SVM in the bottleneck of an autoencoder, trained together (arXiv 1804.04888).

    The loss is ``alpha mean |x - x^|^2 + |w|^2 / 2 - rho + 2 mean max(0, rho - w . phi(z)) / nu``, with random Fourier
    features ``phi(z) = [cos W z, sin W z] / sqrt(R)`` of a Gaussian kernel. W is drawn from N(0, 1 / sigma^2) with the
    initial weights, the same for all clients, and stays constant. In the last rounds only w and rho are trained. The
    score is ``rho - w . phi(z)``.

    The constants, the initial w (N(0, 1), cut at 2), the training in the last rounds, and the factor 2 of the hinge,
    which the paper's equation lacks, are those of the authors' code.

    Args:
        encoder: See `Bottleneck`.
        rounds: Number of all rounds.
        alpha: Weight of the reconstruction.
        nu: Twice the share of training images that may lie on the wrong side.
        sigma: Width of the kernel, in units of z, which is not standardised.
        fourier: Number R of random directions.
        svm_share: Share of the rounds, the last ones, that train only w and rho: one at least if there are several
            rounds; 0 for none.
        svm_learning_rate: Learning rate of Adam in these rounds.
        **bottleneck: See `Bottleneck`.

    Raises:
        UserError: If a number is out of range.
    """

    directions: Tensor

    def __init__(
        self,
        encoder: nn.Module,
        rounds: int,
        alpha: float = 1000.0,
        nu: float = 0.4,
        sigma: float = 3.0,
        fourier: int = 500,
        svm_share: float = 0.09,
        svm_learning_rate: float = 1e-4,
        **bottleneck: Any,
    ) -> None:
        super().__init__(encoder, **bottleneck)
        at_least("task", 0, rounds=rounds, alpha=alpha, svm_learning_rate=svm_learning_rate)
        at_least("task", 1, fourier=fourier)
        above("task", 0, sigma=sigma, nu=nu)
        within("task", 0, 1, nu=nu, svm_share=svm_share)
        self.alpha, self.nu, self.svm_learning_rate = alpha, nu, svm_learning_rate
        svm_rounds = max(round(svm_share * rounds), 1) if svm_share and rounds > 1 else 0
        self.common_rounds = rounds - svm_rounds
        self.register_buffer("directions", torch.randn(fourier, self.num_features) / sigma, persistent=False)
        self.normal = nn.Parameter(nn.init.trunc_normal_(torch.empty(2 * fourier)))
        self.rho = nn.Parameter(torch.zeros(()))

    @property
    def trains_svm_alone(self) -> bool:
        """Whether this round trains only w and rho."""
        return self.round > self.common_rounds

    def forward(self, batch: Mapping[str, Any]) -> Tensor:
        """Computes the bottleneck z [B, D]; in rounds that do not train it, in evaluation mode and without gradient."""
        if not (self.training and self.trains_svm_alone):
            return super().forward(batch)
        with torch.no_grad():
            self.encoder.eval()
            self.compress.eval()
            return super().forward(batch)

    def fourier(self, features: Tensor) -> Tensor:
        """Computes phi(z) [B, 2 R], of length 1."""
        phases = features.to(self.directions) @ self.directions.T
        return torch.cat([phases.cos(), phases.sin()], 1) / len(self.directions) ** 0.5

    def margins(self, features: Tensor) -> Tensor:
        """Computes ``rho - w . phi(z)`` [B], which is above 0 for images outside."""
        with full_precision(features):  # in half precision most images would have equal scores
            return self.rho - self.fourier(features) @ self.normal

    def objective(self, features: Tensor, batch: Mapping[str, Any]) -> dict[str, Tensor]:
        """Computes the loss, and the mean reconstruction error in it as ``reconstruction``."""
        hinge = 2 * self.margins(features).relu().mean() / self.nu
        loss = self.normal.square().sum() / 2 - self.rho + hinge
        if self.trains_svm_alone:
            return {"loss": loss}
        reconstruction = self.errors(features, batch).mean()
        return {"loss": self.alpha * reconstruction + loss, "reconstruction": reconstruction}

    def predict(self, features: Tensor, batch: Mapping[str, Any]) -> Prediction:
        """Scores images by how far they lie outside."""
        return Prediction(image_score=self.margins(features))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Builds Adam of all weights, and in the last rounds only of w and rho."""
        if self.trains_svm_alone:
            return torch.optim.Adam([self.normal, self.rho], lr=self.svm_learning_rate)
        return super().configure_optimizers()
