"""Training a classifier on condensed images."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch.nn import functional as F

from lit_fedad.contracts.compute import set_up
from lit_fedad.core.bounds import above, at_least, below_one, within
from lit_fedad.core.errors import UserError
from lit_fedad.models.diff_augment import diff_augment, draw


@dataclass(frozen=True)
class ExtraLoss:
    """Loss that is added to cross-entropy.

    Attributes:
        module: Function from features [B, D] of images without augmentation and labels [B] to a scalar.
        weight: Weight of the scalar.
        learning_rate: Learning rate of Adam, for the module's own parameters.
    """

    module: nn.Module
    weight: float
    learning_rate: float


@dataclass(frozen=True)
class CondensedTraining:
    """SGD on condensed images; all learning rates, and the weight of an extra loss, fall once, at half time.

    Attributes:
        epochs: Passes over the images.
        batch_size: Images in each step.
        learning_rate: Learning rate of SGD.
        momentum: Momentum of SGD.
        weight_decay: Weight decay of SGD.
        augment: Whether images are augmented for cross-entropy by `diff_augment`, each with its own random draw.
        late_share: Share of the learning rates, and of the extra loss's weight, in the second half; 1 keeps them.

    Raises:
        UserError: If a number is out of range.
    """

    epochs: int
    batch_size: int = 256
    learning_rate: float = 0.01
    momentum: float = 0.9
    weight_decay: float = 5e-4
    augment: bool = True
    late_share: float = 0.1

    def __post_init__(self) -> None:
        at_least("method.server.training", 1, epochs=self.epochs, batch_size=self.batch_size)
        above("method.server.training", 0, learning_rate=self.learning_rate)
        at_least("method.server.training", 0, weight_decay=self.weight_decay)
        below_one("method.server.training", momentum=self.momentum)
        within("method.server.training", 0, 1, late_share=self.late_share)

    def __call__(
        self,
        model: nn.Module,
        features: Callable[[Tensor], Tensor],
        head: nn.Module,
        images: Tensor,
        labels: Tensor,
        normalise: Callable[[Tensor], Tensor],
        generator: torch.Generator,
        fabric: Fabric,
        extra: ExtraLoss | None = None,
    ) -> dict[str, float]:
        """Trains a model in place.

        Args:
            model: All trained modules, on the device.
            features: Function from normalised images [B, C, H, W] to features.
            head: Function from features to logits.
            images: Images as sent [n, C, H, W].
            labels: Classes, int64 [n].
            normalise: Function from images as sent to normalised images.
            generator: Source of batches and augmentations.
            fabric: Fabric with device and precision.
            extra: Additional loss.

        Returns:
            Loss and accuracy of the last epoch.

        Raises:
            UserError: If training diverges.
        """
        images, labels = images.to(fabric.device), labels.to(fabric.device)
        rates = [self.learning_rate]
        sgd = torch.optim.SGD(
            model.parameters(),
            lr=self.learning_rate,
            momentum=self.momentum,
            weight_decay=self.weight_decay,
        )
        optimizers = [set_up(sgd, fabric)]
        if extra is not None:
            extra.module.to(fabric.device).train()
            adam = torch.optim.Adam(extra.module.parameters(), lr=extra.learning_rate)
            optimizers.append(set_up(adam, fabric))
            rates.append(extra.learning_rate)
        model.train()
        total = correct = 0.0
        for epoch in range(self.epochs):
            share = 1.0 if 2 * epoch < self.epochs else self.late_share
            for optimizer, rate in zip(optimizers, rates, strict=True):
                optimizer.param_groups[0]["lr"] = share * rate
            total = correct = 0.0
            order = torch.randperm(len(labels), generator=generator).to(fabric.device)
            for rows in order.split(self.batch_size):
                batch, target = normalise(images[rows]), labels[rows]
                use_extra = extra is not None and len(rows) > 1  # a single image has no batch statistics
                view = batch
                if self.augment:
                    groups = torch.arange(len(rows), device=batch.device)
                    view = diff_augment(batch, draw(len(rows), generator), groups)
                with fabric.autocast():
                    logits = head(features(view)).float()
                    loss = F.cross_entropy(logits, target)
                    if extra is not None and use_extra:
                        loss = loss + share * extra.weight * extra.module(features(batch).float(), target)
                if not torch.isfinite(loss):
                    raise UserError(
                        "training on the server diverged; lower method.server.training.learning_rate"
                    )
                for optimizer in optimizers:
                    optimizer.zero_grad()
                fabric.backward(loss)
                for optimizer in optimizers if use_extra else optimizers[:1]:
                    optimizer.step()
                total += float(loss.detach()) * len(rows)
                correct += int((logits.detach().argmax(1) == target).sum())
        model.eval()
        return {"server_loss": total / len(labels), "server_accuracy": correct / len(labels)}
