"""ResNet-18 and ResNet-34 as encoders of small images."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.models.resnet import BasicBlock, ResNet

from lit_fedad.core.bounds import at_least


class BatchNorm(nn.BatchNorm2d):
    """Batch normalisation whose running statistics ignore a batch of one image.

    Last batches of one image are common among small clients. Such an image is normalised over its own positions, and
    the running statistics, which every prediction uses, do not move towards it. Where its map is 1x1, for which torch
    raises an error, the running statistics normalise it.

    Example:
        >>> import torch
        >>> norm = BatchNorm(1)
        >>> norm(torch.tensor([[[[3.0, 5.0]]]])).flatten().tolist()
        [-0.99..., 0.99...]
        >>> norm.running_mean.item()
        0.0
    """

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  (torch's name)
        """Normalises maps [B, C, H, W]."""
        if len(input) > 1 or not self.training:
            return super().forward(input)
        if input[0, 0].numel() > 1:
            return F.batch_norm(input, None, None, self.weight, self.bias, training=True, eps=self.eps)
        return F.batch_norm(
            input, self.running_mean, self.running_var, self.weight, self.bias, training=False, eps=self.eps
        )


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


class ResNetCifar(ResNet):
    """A ResNet (He et al. 2016) from images [B, inputs, S, S] to features [B, 8 * channels], without a classifier.

    With the stem ``"cifar"``, one 3x3 convolution of stride 1 without pooling, the last map is S / 8 wide: 4x4 for
    images of 32 pixels. ``"imagenet"`` is the original stem, 7x7 of stride 2 and pooling, for images of 64 pixels and
    more: the last map is S / 32 wide.

    Args:
        depth: 18 or 34.
        stem: ``"cifar"`` or ``"imagenet"``.
        channels: Channels of the first stage; 64 are the original's, fewer save time and memory.
        inputs: Channels of the images.

    Attributes:
        num_features: Number of features, 8 * channels.

    Example:
        >>> import torch
        >>> ResNetCifar(18)(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 512])
    """

    def __init__(
        self,
        depth: Literal[18, 34] = 18,
        stem: Literal["cifar", "imagenet"] = "cifar",
        channels: int = 64,
        inputs: int = 3,
    ) -> None:
        at_least("encoder", 1, channels=channels, inputs=inputs)
        self.channels, self.num_features = channels, 8 * channels
        blocks = {18: [2, 2, 2, 2], 34: [3, 4, 6, 3]}[depth]
        super().__init__(BasicBlock, blocks, norm_layer=BatchNorm)
        self.fc = nn.Identity()
        if stem == "cifar" or channels != 64 or inputs != 3:
            side, stride = (3, 1) if stem == "cifar" else (7, 2)
            self.conv1 = nn.Conv2d(inputs, channels, side, stride, side // 2, bias=False)
            nn.init.kaiming_normal_(self.conv1.weight, mode="fan_out", nonlinearity="relu")
            self.bn1 = BatchNorm(channels)
        if stem == "cifar":
            self.maxpool = nn.Identity()

    def _make_layer(
        self, block: type[BasicBlock], planes: int, blocks: int, stride: int = 1, dilate: bool = False
    ) -> nn.Sequential:
        if planes == 64:
            self.inplanes = self.channels
        return super()._make_layer(block, planes * self.channels // 64, blocks, stride, dilate)

    def forward(self, images: Tensor) -> Tensor:
        """Encodes images to features [B, num_features]; channels come last in memory, a third faster on a CPU."""
        # With fewer channels, oneDNN's 1x1 convolution of stride 2 writes past its memory (torch 2.13).
        if self.channels % 16 == 0:
            images = images.contiguous(memory_format=torch.channels_last)
        return super().forward(images)
