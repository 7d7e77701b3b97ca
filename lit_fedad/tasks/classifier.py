"""Image classification: an encoder and a linear head."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lit_fedad.contracts import Prediction, Task
from lit_fedad.core.bounds import at_least, below_one


def crop_and_flip(images: Tensor, padding: int = 4) -> Tensor:
    """Shifts each image at random and mirrors it with probability 0.5, as is usual for CIFAR.

    Images [B, C, H, W] are padded with zeros, the mean colour of normalised images, and each is cropped to its size at
    a random position. Draws come from torch's global CPU generator, whatever the device.
    """
    count, channels, height, width = images.shape
    top, left = torch.randint(2 * padding + 1, (2, count, 1))
    rows, columns = top + torch.arange(height), left + torch.arange(width)
    columns = torch.where(torch.rand(count, 1) < 0.5, columns.flip(1), columns)
    image, channel = torch.arange(count)[:, None, None, None], torch.arange(channels)[:, None, None]
    indices = (image, channel, rows[:, None, :, None], columns[:, None, None, :])
    return F.pad(images, [padding] * 4)[tuple(index.to(images.device) for index in indices)]


class Classifier(Task):
    """A classifier trained by cross-entropy; its features are the encoder's output, before the linear head.

    Args:
        encoder: Maps images [B, 3, S, S] (grey: [B, 1, S, S]) to features [B, C], with C as its attribute
            ``num_features``.
        classes: Number of classes K.
        augment: Whether training images are randomly shifted, by up to an eighth of the side, and mirrored; cached
            frozen features are not augmented.
        learning_rate: Learning rate of SGD.
        momentum: Momentum of SGD.
        weight_decay: Weight decay of SGD.
    """

    kind = "classification"
    output_modules = ("classifier",)

    def __init__(
        self,
        encoder: nn.Module,
        classes: int,
        augment: bool = True,
        learning_rate: float = 0.01,
        momentum: float = 0.9,
        weight_decay: float = 1e-4,
    ) -> None:
        super().__init__()
        at_least("task", 0, learning_rate=learning_rate, weight_decay=weight_decay)
        below_one("task", momentum=momentum)
        self.encoder = encoder
        self.num_features: int = encoder.num_features  # type: ignore[assignment]
        self.classes = classes
        self.classifier = nn.Linear(self.num_features, classes)
        self.augment = augment
        self.learning_rate, self.momentum, self.weight_decay = learning_rate, momentum, weight_decay

    def view(self, batch: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns the batch, with augmented images if `augment` is set."""
        images = batch["image"]
        if not self.augment or images.ndim == 2:
            return batch
        return {**batch, "image": crop_and_flip(images, padding=images.shape[-1] // 8)}

    def forward(self, batch: Mapping[str, Any]) -> Tensor:
        """Computes the encoder's features [B, C]."""
        return self.encoder(batch["image"])

    def objective(self, features: Tensor, batch: Mapping[str, Any]) -> dict[str, Tensor]:
        """Computes the cross-entropy as ``loss``, and ``accuracy``."""
        logits, labels = self.classifier(features), batch["label"]
        accuracy = (logits.detach().argmax(1) == labels).float().mean()
        return {"loss": F.cross_entropy(logits, labels), "accuracy": accuracy}

    def predict(self, features: Tensor, batch: Mapping[str, Any]) -> Prediction:
        """Computes class logits; an image's score is the probability of all classes but the most likely."""
        logits = self.classifier(features)
        return Prediction(image_score=uncertainty(logits), logits=logits)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Builds SGD with momentum."""
        return torch.optim.SGD(
            self.parameters(), lr=self.learning_rate, momentum=self.momentum, weight_decay=self.weight_decay
        )


def uncertainty(logits: Tensor) -> Tensor:
    """Computes the probability [B] of all classes but the most likely one, from logits [B, K].

    It adds up the other probabilities: 1 minus the largest would lose its digits, or be 0, if the classifier is sure.

    Example:
        >>> bool(0 < uncertainty(torch.tensor([[40.0, 0.0]])) < 1e-17)
        True
    """
    probabilities = logits.softmax(1)
    return probabilities.scatter(1, probabilities.argmax(1, keepdim=True), 0.0).sum(1)
