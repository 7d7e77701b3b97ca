"""The optimisation that turns many real images into a few synthetic ones of the same classes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from lightning.fabric import Fabric
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from lit_fedad.errors import UserError
from lit_fedad.models.diff_augment import diff_augment, draw


class RealBatch(NamedTuple):
    """Draws of a client's classes with replacement, each image held once.

    Attributes:
        images: The u different images, sorted by class [u, C, H, W].
        times: How often each was drawn, int64 [u].
        sizes: Number of different images of each class.
    """

    images: Tensor
    times: Tensor
    sizes: list[int]


Distance = Callable[[RealBatch, Tensor], Tensor]
"""Function from a batch of real images and all synthetic ones, sorted by class, to the loss."""


@dataclass(frozen=True)
class Condensation:
    """Optimisation of synthetic images, by SGD, to a small distance from batches of real ones.

    Every step draws a batch of each class with replacement. All classes go through the network at once; the images
    of a class, real and synthetic, are augmented alike.

    Attributes:
        steps: Steps of SGD.
        batch: Real images of each class in a step.
        learning_rate: Learning rate of SGD, for normalised images.
        momentum: Momentum of SGD.
        clip: Largest norm of the gradient in all images; None for no limit.
        augment: Whether real and synthetic images are augmented by `diff_augment`.

    Raises:
        UserError: If a number is out of range.
    """

    steps: int
    batch: int = 256
    learning_rate: float = 1.0
    momentum: float = 0.5
    clip: float | None = None
    augment: bool = True

    def __post_init__(self) -> None:
        if (
            self.steps < 0
            or self.batch < 1
            or self.learning_rate <= 0
            or (self.clip is not None and self.clip <= 0)
        ):
            raise UserError(
                f"method.client.condensation.steps={self.steps}, batch={self.batch},"
                f" learning_rate={self.learning_rate}, clip={self.clip}: give at least 0 steps, a batch of at least 1,"
                " numbers above 0"
            )

    def __call__(
        self,
        start: Tensor,
        counts: Sequence[int],
        real: Tensor,
        weights: Sequence[Tensor],
        distance: Distance,
        generator: torch.Generator,
        fabric: Fabric,
    ) -> tuple[Tensor, list[float]]:
        """Optimises synthetic images.

        Args:
            start: Synthetic images [sum(counts), C, H, W], sorted by class.
            counts: Number of synthetic images of each of the k classes.
            real: Real images [n, C, H, W], sorted by class.
            weights: For each class, the probability of each of its real images [n_c]; n in all.
            distance: Loss, called with augmented real images, ``batch`` draws of each class, and synthetic ones
                [sum(counts), C, H, W].
            generator: Source of batches and augmentations.
            fabric: Fabric with device and precision.

        Returns:
            The synthetic images, and the loss of every step.

        Raises:
            UserError: If the loss is not finite.
        """
        device = fabric.device
        synthetic = start.to(device, copy=True).requires_grad_()
        descent = torch.optim.SGD([synthetic], lr=self.learning_rate, momentum=self.momentum)
        optimizer = fabric.setup_optimizers(descent)
        assert isinstance(optimizer, torch.optim.Optimizer)
        classes = torch.arange(len(counts))
        synthetic_class = classes.repeat_interleave(torch.tensor(counts)).to(device)
        losses = []
        for _ in range(self.steps):
            batch, images = self._drawn(real, weights, generator, device), synthetic
            if self.augment:
                drawn = draw(len(counts), generator)
                real_class = classes.repeat_interleave(torch.tensor(batch.sizes)).to(device)
                batch = batch._replace(images=diff_augment(batch.images, drawn, real_class))
                images = diff_augment(images, drawn, synthetic_class)
            with fabric.autocast():
                loss = distance(batch, images)
            if not torch.isfinite(loss):
                raise UserError("condensation diverged; lower method.client.condensation.learning_rate")
            optimizer.zero_grad()
            fabric.backward(loss)
            if self.clip is not None:
                fabric.strategy.precision.unscale_gradients(descent)
                clip_grad_norm_([synthetic], self.clip)
            optimizer.step()
            losses.append(float(loss.detach()))
        return synthetic.detach(), losses

    def _drawn(
        self, real: Tensor, weights: Sequence[Tensor], generator: torch.Generator, device: torch.device
    ) -> RealBatch:
        """As many images of every class."""
        rows, times, first = [], [], 0
        for chances in weights:
            chosen = torch.multinomial(chances, self.batch, replacement=True, generator=generator)
            different, often = chosen.unique(return_counts=True)
            rows.append(first + different)
            times.append(often)
            first += len(chances)
        return RealBatch(real[torch.cat(rows)].to(device), torch.cat(times).to(device), list(map(len, rows)))
