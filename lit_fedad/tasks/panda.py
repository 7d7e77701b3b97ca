"""PANDA: pretrained features made compact, scored by their nearest neighbours (Reiss et al., CVPR 2021)."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lit_fedad.contracts import Context, Prediction, Task
from lit_fedad.contracts.compute import map_batches
from lit_fedad.core.bounds import at_least, below_one
from lit_fedad.core.errors import UserError
from lit_fedad.models.encoders import FrozenEncoder
from lit_fedad.tasks.frozen_detectors import neighbour_scores


class Panda(Task):
    """Features that training draws to the mean of the pretrained ones; the score is the distance to a bank.

    The original trains the last stages of a ResNet. Here a residual network on frozen features replaces them. It adds
    nothing before training, so that the model of round 0 is nearest neighbours of pretrained features (DN2). The score
    is the sum of squared distances to the ``neighbours`` nearest vectors of the bank.

    The loss is ``mean |f(x) - c|^2``, with c the mean of all images' initial features, plus the elastic weight
    consolidation ``C ewc / 2 sum F (w - w_0)^2``: C times the loss of the authors' code, which divides by the number C
    of channels. F is the Fisher information of a normal distribution of features around f(x), on normal images; the
    original's is that of ImageNet's labels. Features are not scaled to length 1, as in the authors' code.

    The bank and c are buffers, which the method of the same name shares; with other methods each client has its own,
    computed from all of its images.

    Args:
        encoder: A `FrozenEncoder` with a network.
        neighbours: Number of nearest vectors of the bank whose distances a score adds up.
        ewc: Weight of the consolidation; 0 for none, as in the original's early-stopping variant. The original's weight
            is 1e4.
        learning_rate: Learning rate of SGD.
        momentum: Momentum of SGD.
        weight_decay: Weight decay of SGD.

    Raises:
        UserError: If the encoder is trained on pixels or has no network, or a number is out of range.
    """

    prepares = True
    trains_on_bank = False
    local_buffers = ("bank", "centre")
    scoring_buffers = local_buffers
    free_buffers = ("bank",)
    bank: Tensor
    centre: Tensor

    def __init__(
        self,
        encoder: nn.Module,
        neighbours: int = 2,
        ewc: float = 0.0,
        learning_rate: float = 0.01,
        momentum: float = 0.9,
        weight_decay: float = 5e-5,
    ) -> None:
        super().__init__()
        at_least("task", 1, neighbours=neighbours)
        at_least("task", 0, ewc=ewc, learning_rate=learning_rate, weight_decay=weight_decay)
        below_one("task", momentum=momentum)
        if not isinstance(encoder, FrozenEncoder) or encoder.network is None:
            raise UserError(
                "task panda adapts pretrained features: give features=frozen, with features.hidden of at least 1"
            )
        self.encoder, self.num_features = encoder, encoder.num_features
        encoder.unit_length = False
        self.neighbours, self.ewc = neighbours, ewc
        self.learning_rate, self.momentum, self.weight_decay = learning_rate, momentum, weight_decay
        self.register_buffer("bank", torch.empty(0, self.num_features))
        self.register_buffer("centre", torch.zeros(self.num_features))
        self.start = self._weights()
        self.fisher: dict[str, Tensor] = {}

    def begin_with(self, weights: Mapping[str, Tensor]) -> None:
        """Begins with the weights of another run; the consolidation then keeps weights near these."""
        super().begin_with(weights)
        self.start = self._weights()

    def forward(self, batch: Mapping[str, Any]) -> Tensor:
        """Computes features [B, C]."""
        return self.encoder(batch["image"])

    def objective(self, features: Tensor, batch: Mapping[str, Any]) -> dict[str, Tensor]:
        """Computes the loss, and with consolidation the ``drift`` from the initial weights.

        Raises:
            UserError: If there is consolidation, and the method has sent no Fisher information.
        """
        compactness = (features - self.centre).square().sum(1).mean()
        if not self.ewc:
            return {"loss": compactness}
        if not self.fisher:
            raise UserError(
                f"task.ewc={self.ewc}: METHOD=panda alone has clients estimate what weights are held by; give it, or"
                " task.ewc=0"
            )
        weights = self._network.named_parameters()
        changes = {name: weight - self.start[name].to(weight) for name, weight in weights}
        drifts = [(self.fisher[name].to(change) * change.square()).sum() for name, change in changes.items()]
        drift = torch.stack(drifts).sum()
        return {"loss": compactness + self.num_features * self.ewc / 2 * drift, "drift": drift}

    def predict(self, features: Tensor, batch: Mapping[str, Any]) -> Prediction:
        """Computes each image's sum of squared distances to its nearest neighbours."""
        if not len(self.bank):
            raise UserError("there is no bank to score by: no client has sent one")
        return Prediction(image_score=neighbour_scores(features, self.bank, self.neighbours))

    def refresh(self, loader: DataLoader, context: Context, first: bool = False) -> None:
        """Fills the bank with local features; the first time, their mean becomes the centre."""
        features = self.embed(loader)
        self.bank = features.to(self.bank)
        if first:
            self.centre = features.mean(0).to(self.centre)

    @torch.no_grad()
    def embed(self, loader: DataLoader) -> Tensor:
        """Computes the features of all images [n, C]."""
        return torch.cat([features.float().cpu() for features in map_batches(self, loader, self)])

    def estimate_fisher(self, loader: DataLoader, generator: torch.Generator) -> dict[str, Tensor]:
        """Estimates F of the network's weights: the mean over images of ``sum_j (d f_j / d w)^2``.

        One random direction v for each image replaces the sum over channels: the expected square of
        ``d (v . f) / d w`` is this sum. Gradients of a whole batch are added before squaring, since products of the
        gradients of two images have expectation 0.
        """
        weights = dict(self._network.named_parameters())
        total = {name: torch.zeros_like(weight) for name, weight in weights.items()}
        images = 0
        for features in map_batches(self, loader, self):
            directions = torch.randn(features.shape, generator=generator).to(features)
            gradients = torch.autograd.grad((directions * features).sum(), list(weights.values()))
            for name, gradient in zip(weights, gradients, strict=True):
                total[name] += gradient.square()
            images += len(features)
        return {name: entry.cpu() / max(images, 1) for name, entry in total.items()}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Builds SGD with momentum of the network's weights, and of weights that a method adds."""
        return torch.optim.SGD(
            self.trainable,
            lr=self.learning_rate,
            momentum=self.momentum,
            weight_decay=self.weight_decay,
        )

    def _weights(self) -> dict[str, Tensor]:
        """Copies the network's weights, by name."""
        return {name: weight.detach().clone() for name, weight in self._network.named_parameters()}

    @property
    def _network(self) -> nn.Module:
        assert isinstance(self.encoder.network, nn.Module)
        return self.encoder.network
