"""The optimisation that turns many real images into a few synthetic ones of the same classes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from lightning.fabric import Fabric
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from lit_fedad.contracts.compute import set_up
from lit_fedad.core.bounds import above, at_least, below_one
from lit_fedad.core.errors import UserError
from lit_fedad.models.diff_augment import diff_augment, draw


@dataclass(frozen=True)
class Descent:
    """SGD on images.

    Attributes:
        steps: Steps of SGD.
        learning_rate: Learning rate of SGD, for normalised images.
        momentum: Momentum of SGD.
        clip: Largest norm of the gradient in all images; None for no limit.
        section: Section of the configuration that has these numbers, for error messages.

    Raises:
        UserError: If a number is out of range.
    """

    section: ClassVar[str] = "method.server.descent"

    steps: int
    learning_rate: float = 1.0
    momentum: float = 0.5
    clip: float | None = None

    def __post_init__(self) -> None:
        at_least(self.section, 0, steps=self.steps)
        below_one(self.section, momentum=self.momentum)
        above(self.section, 0, learning_rate=self.learning_rate, clip=self.clip)

    def descend(
        self, start: Tensor, loss: Callable[[Tensor], Tensor], fabric: Fabric
    ) -> tuple[Tensor, list[float]]:
        """Optimises images.

        Args:
            start: Images [n, C, H, W].
            loss: Function of the images, called once in each step in the Fabric's precision.
            fabric: Fabric with device and precision.

        Returns:
            The images on the device, and the loss of every step.

        Raises:
            UserError: If the loss, or an image after the last step, is not finite.
        """
        images = start.to(fabric.device, copy=True).requires_grad_()
        descent = torch.optim.SGD([images], lr=self.learning_rate, momentum=self.momentum)
        optimizer = set_up(descent, fabric)
        losses = []
        for _ in range(self.steps):
            with fabric.autocast():
                value = loss(images)
            if not torch.isfinite(value):
                raise self._diverged()
            optimizer.zero_grad()
            fabric.backward(value)
            if self.clip is not None:
                fabric.strategy.precision.unscale_gradients(descent)
                clip_grad_norm_([images], self.clip)
            optimizer.step()
            losses.append(float(value.detach()))
        if not images.isfinite().all():
            raise self._diverged()
        return images.detach(), losses

    def _diverged(self) -> UserError:
        return UserError(f"condensation diverged; lower {self.section}.learning_rate")


class RealBatch(NamedTuple):
    """Images drawn with replacement from each of a client's classes; an image drawn several times is held once.

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
class Condensation(Descent):
    """Optimisation of synthetic images, by SGD, to a small distance from batches of real ones.

    Every step draws a batch of each class with replacement. All classes pass through the network at once. Real and
    synthetic images of a class are augmented in the same way.

    Attributes:
        batch: Number of real images drawn from each class in a step.
        augment: Whether real and synthetic images are augmented by `diff_augment`.

    Raises:
        UserError: If a number is out of range.
    """

    section: ClassVar[str] = "method.client.condensation"

    batch: int = 256
    augment: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self.section, 1, batch=self.batch)

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
            weights: For each class, the weights [n_c] with which its real images are drawn; n in all.
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
        classes = torch.arange(len(counts))
        synthetic_class = classes.repeat_interleave(torch.tensor(counts)).to(device)

        def loss(synthetic: Tensor) -> Tensor:
            batch = self._draw_batch(real, weights, generator, device)
            if self.augment:
                augmentation = draw(len(counts), generator)
                real_class = classes.repeat_interleave(torch.tensor(batch.sizes)).to(device)
                batch = batch._replace(images=diff_augment(batch.images, augmentation, real_class))
                synthetic = diff_augment(synthetic, augmentation, synthetic_class)
            return distance(batch, synthetic)

        return self.descend(start, loss, fabric)

    def _draw_batch(
        self, real: Tensor, weights: Sequence[Tensor], generator: torch.Generator, device: torch.device
    ) -> RealBatch:
        """Draws ``batch`` images of every class, with replacement."""
        rows, times, first = [], [], 0
        for class_weights in weights:
            chosen = torch.multinomial(class_weights, self.batch, replacement=True, generator=generator)
            different, counts = chosen.unique(return_counts=True)
            rows.append(first + different)
            times.append(counts)
            first += len(class_weights)
        return RealBatch(real[torch.cat(rows)].to(device), torch.cat(times).to(device), list(map(len, rows)))
