"""What one-class objectives have in common: a bottleneck, from which images or their frozen features come back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lit_fedad.contracts import Task
from lit_fedad.guards.bounds import at_least
from lit_fedad.models.frozen_encoder import FrozenEncoder
from lit_fedad.models.lenet import contrast_normalised

_CONTRAST = 4.0  # mean absolute deviations of an image that [0, 1] spans on either side of its mean


class Bottleneck(Task):
    """A task whose features are a bottleneck z that images can be reconstructed from.

    On pixels, images are brought to [0, 1], encoded and decoded. On frozen features a hidden layer leads to the
    bottleneck and another one back.

    Args:
        encoder: Maps images [B, 3, S, S] to features [B, C], with C as its attribute ``num_features``: a network that
            is trained on pixels, or a `FrozenEncoder` without a network of its own.
        decoder: Builds the decoder to images in [0, 1], given the width of the bottleneck and S; not used where the
            encoder is frozen.
        image_size: Side S of the images in pixels.
        mean: Channel means by which images were normalised.
        std: Channel standard deviations by which images were normalised.
        width: Numbers of the bottleneck D.
        hidden: Hidden units between frozen features and bottleneck, and back.
        bias: Whether layers on the way to the bottleneck have biases.
        pixels: What [0, 1] means: ``plain`` pixels, or pixels after global ``contrast`` normalisation of each image,
            four mean absolute deviations to either side of its mean.
        learning_rate: Learning rate of Adam.
        weight_decay: Weight decay of Adam.

    Raises:
        UserError: If a number is out of range.
    """

    output_modules: tuple[str, ...] = ("decoder",)
    mean: Tensor
    std: Tensor

    def __init__(
        self,
        encoder: nn.Module,
        decoder: Callable[[int, int], nn.Module],
        image_size: int,
        mean: Sequence[float],
        std: Sequence[float],
        width: int = 128,
        hidden: int = 256,
        bias: bool = True,
        pixels: Literal["plain", "contrast"] = "plain",
        learning_rate: float = 1e-3,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__()
        at_least("task", 1, width=width, hidden=hidden)
        at_least("task", 0, learning_rate=learning_rate, weight_decay=weight_decay)
        self.encoder, self.num_features, self.pixels = encoder, width, pixels
        channels: int = encoder.num_features  # type: ignore[assignment]
        self.frozen = isinstance(encoder, FrozenEncoder)
        if isinstance(encoder, FrozenEncoder):
            into, back = nn.Linear(channels, hidden, bias=bias), nn.Linear(width, hidden)
            self.compress: nn.Module = nn.Sequential(
                into, nn.LeakyReLU(), nn.Linear(hidden, width, bias=bias)
            )
            self.decoder: nn.Module = nn.Sequential(back, nn.LeakyReLU(), nn.Linear(hidden, channels))
        else:
            self.compress = nn.Linear(channels, width, bias=bias)
            self.decoder = decoder(width, image_size)
        self.learning_rate, self.weight_decay = learning_rate, weight_decay
        self.register_buffer("mean", torch.tensor(mean).view(-1, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(std).view(-1, 1, 1), persistent=False)

    def forward(self, batch: Mapping[str, Any]) -> Tensor:
        """Computes the bottleneck z [B, D]."""
        inputs = self._inputs(batch)
        return self.compress(inputs if self.frozen else self.encoder(inputs))

    def errors(self, features: Tensor, batch: Mapping[str, Any]) -> Tensor:
        """Computes the mean squared error of each image's reconstruction [B]."""
        return (self.decoder(features) - self._inputs(batch)).square().flatten(1).mean(1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Builds Adam of what is trained."""
        trained = (parameter for parameter in self.parameters() if parameter.requires_grad)
        return torch.optim.Adam(trained, lr=self.learning_rate, weight_decay=self.weight_decay)

    def _inputs(self, batch: Mapping[str, Any]) -> Tensor:
        """Computes what is reconstructed: images in [0, 1] [B, 3, S, S], or frozen features [B, C]."""
        if self.frozen:
            return self.encoder(batch["image"])
        images = batch["image"] * self.std + self.mean
        return images if self.pixels == "plain" else 0.5 + contrast_normalised(images) / (2 * _CONTRAST)
