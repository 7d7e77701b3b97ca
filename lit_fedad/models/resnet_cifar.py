"""ResNet-18 and ResNet-34 as encoders of small images."""

from typing import Literal

import torch
from torch import Tensor, nn
from torchvision.models.resnet import BasicBlock, ResNet

from lit_fedad.guards.bounds import at_least
from lit_fedad.models.batch_norm import BatchNorm


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
