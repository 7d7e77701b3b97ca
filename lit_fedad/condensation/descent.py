"""Gradient descent on images."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from lightning.fabric import Fabric
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from lit_fedad.errors import UserError
from lit_fedad.guards.bounds import above, at_least


@dataclass(frozen=True)
class Descent:
    """SGD on images.

    Attributes:
        steps: Steps of SGD.
        learning_rate: Learning rate of SGD, for normalised images.
        momentum: Momentum of SGD.
        clip: Largest norm of the gradient in all images; None for no limit.
        section: Section of the configuration that these numbers come from, for messages; a subclass names its own.

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
        above(self.section, 0, learning_rate=self.learning_rate, clip=self.clip)

    def __call__(
        self, start: Tensor, loss: Callable[[Tensor], Tensor], fabric: Fabric
    ) -> tuple[Tensor, list[float]]:
        """Optimises images.

        Args:
            start: Images [n, C, H, W].
            loss: Function of the images, called once a step in the Fabric's precision.
            fabric: Fabric with device and precision.

        Returns:
            The images on the device, and the loss of every step.

        Raises:
            UserError: If the loss, or an image after the last step, is not finite.
        """
        images = start.to(fabric.device, copy=True).requires_grad_()
        descent = torch.optim.SGD([images], lr=self.learning_rate, momentum=self.momentum)
        optimizer = fabric.setup_optimizers(descent)
        assert isinstance(optimizer, torch.optim.Optimizer)
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
