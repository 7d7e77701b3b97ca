"""ConvNet: the small convolutional network of data set distillation."""

from typing import Literal

import torch
from torch import Tensor, nn

from lit_fedad.guards.bounds import at_least
from lit_fedad.models.batch_norm import BatchNorm


class ConvNet(nn.Sequential):
    """Three blocks of convolution, norm, ReLU and average pooling: images [B, inputs, S, S] to features [B, C].

    The encoder of FedVCK's ConvNet (batch norm there) and of data set distillation (Zhao et al. 2021; instance norm).
    Images of 28 pixels are padded to 32, so that their last map is 4x4 as well.

    Args:
        image_size: S, the side of the images in pixels.
        norm: ``"batch"`` or ``"instance"``.
        channels: Channels of every block.
        inputs: Channels of the images.

    Attributes:
        num_features: Number of features C: 2,048 for images of 28 or 32 pixels.

    Example:
        >>> import torch
        >>> ConvNet(image_size=28)(torch.zeros(2, 3, 28, 28)).shape
        torch.Size([2, 2048])
    """

    def __init__(
        self,
        image_size: int,
        norm: Literal["batch", "instance"] = "batch",
        channels: int = 128,
        inputs: int = 3,
    ) -> None:
        at_least("encoder", 8, image_size=image_size)  # three halvings
        at_least("encoder", 1, channels=channels, inputs=inputs)
        padding = 3 if image_size == 28 else 1
        layers: list[nn.Module] = []
        for before, pad in [(inputs, padding), (channels, 1), (channels, 1)]:
            normalise = BatchNorm(channels) if norm == "batch" else nn.InstanceNorm2d(channels, affine=True)
            layers += [
                nn.Conv2d(before, channels, 3, padding=pad),
                normalise,
                nn.ReLU(inplace=True),
                nn.AvgPool2d(2),
            ]
        super().__init__(*layers, nn.Flatten())
        self.num_features = channels * ((image_size + 2 * (padding - 1)) // 8) ** 2

    def forward(self, images: Tensor) -> Tensor:
        """Encodes images to features [B, num_features]; channels come last in memory, which is faster on a CPU."""
        features: Tensor = super().forward(images.contiguous(memory_format=torch.channels_last))
        return features
