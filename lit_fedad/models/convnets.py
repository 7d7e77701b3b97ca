"""Encoders of small images, and the decoders of autoencoders."""

import itertools
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.models.resnet import BasicBlock, ResNet, conv1x1

from lit_fedad.core.bounds import at_least
from lit_fedad.core.errors import UserError


class BatchNorm(nn.BatchNorm2d):
    """Batch normalisation whose running statistics ignore a batch of one image.

    Small clients often have a last batch of one image. Such an image is normalised over its own positions, and the
    running statistics, which every prediction uses, do not move towards it. If its map is 1x1, for which torch raises
    an error, the running statistics normalise it.
    """

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  (torch's name)
        """Normalises maps [B, C, H, W]."""
        if not self.training or len(input) > 1:
            return super().forward(input)
        if input[0, 0].numel() > 1:
            return F.batch_norm(input, None, None, self.weight, self.bias, training=True, eps=self.eps)
        return F.batch_norm(
            input, self.running_mean, self.running_var, self.weight, self.bias, training=False, eps=self.eps
        )


class ConvNet(nn.Sequential):
    """Three blocks of convolution, norm, ReLU and average pooling: images [B, inputs, S, S] to features [B, C].

    The encoder of FedVCK's ConvNet (batch norm there) and of data set distillation (Zhao et al. 2021; instance norm).
    Images of 28 pixels are padded to 32, so that their last map is 4x4 too.

    Args:
        image_size: S, the side of the images in pixels.
        norm: ``"batch"`` or ``"instance"``.
        channels: Channels of every block.
        inputs: Channels of the images.

    Attributes:
        num_features: Number of features C: 2,048 for images of 28 or 32 pixels.
    """

    def __init__(
        self,
        image_size: int,
        norm: Literal["batch", "instance"] = "batch",
        channels: int = 128,
        inputs: int = 3,
    ) -> None:
        at_least("encoder", 8, image_size=image_size)  # the side is halved three times
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


def first_side(image_size: int) -> int:
    """Finds the side from 4 to 7 that becomes ``image_size`` by doubling.

    Raises:
        UserError: If there is no such side.
    """
    side = image_size
    while side > 7 and side % 2 == 0:
        side //= 2
    if not 4 <= side <= 7:
        raise UserError(
            f"image.size={image_size}: the decoder doubles a map of side 4 to 7; take 32, 64, 96, 128, 160, 192, 224 or"
            " 256"
        )
    return side


class Decoder(nn.Sequential):
    """Residual upsampling blocks: latent vectors [B, latent] to images [B, 3, S, S] in [0, 1].

    A linear layer computes the first map, of side 4 to 7; each block doubles the side and halves the channels. The
    FADngs paper says of its autoencoder's decoder only "residual upsampling blocks, sigmoid": widths are our choice.

    Args:
        latent: Length of the latent vector.
        image_size: S, the side of the images in pixels: 4 to 7 times a power of two.
        channels: Channels of the first map; blocks have at least 16.

    Raises:
        UserError: If doubling cannot reach the image size.
    """

    def __init__(self, latent: int, image_size: int, channels: int = 256) -> None:
        at_least("task.decoder", 1, latent=latent, channels=channels)
        side = first_side(image_size)
        layers: list[nn.Module] = [
            nn.Linear(latent, channels * side**2),
            nn.Unflatten(1, (channels, side, side)),
        ]
        while side < image_size:
            halved = max(channels // 2, 16)
            shortcut = nn.Sequential(conv1x1(channels, halved), BatchNorm(halved))
            layers += [
                nn.Upsample(scale_factor=2),
                BasicBlock(channels, halved, downsample=shortcut, norm_layer=BatchNorm),
            ]
            side, channels = 2 * side, halved
        super().__init__(*layers, nn.Conv2d(channels, 3, 3, padding=1), nn.Sigmoid())


_EPSILON = 1e-4


def _norm(channels: int) -> nn.BatchNorm2d:
    return nn.BatchNorm2d(channels, eps=_EPSILON, affine=False)


class LeNet(nn.Sequential):
    """Three blocks of a 5x5 convolution, norm, leaky ReLU and max-pooling: images to features [B, C].

    This is the encoder of Deep SVDD for CIFAR-10 (Ruff et al., ICML 2018). It has neither biases nor affine
    normalisation: with such constants, all images could be mapped to the centre.

    Args:
        image_size: S, the side of the images in pixels; a multiple of 8.
        channels: Channels of the first block; the others have two and four times as many.
        inputs: Channels of the images.

    Attributes:
        num_features: Number of features C: 2,048 for images of 32 pixels.

    Raises:
        UserError: If the side is no multiple of 8.
    """

    def __init__(self, image_size: int, channels: int = 32, inputs: int = 3) -> None:
        at_least("encoder", 1, channels=channels, inputs=inputs)
        if image_size < 8 or image_size % 8:
            raise UserError(
                f"image.size={image_size}: LeNet halves the side three times; give a multiple of 8, or another encoder"
            )
        widths = [inputs, channels, 2 * channels, 4 * channels]
        layers: list[nn.Module] = []
        for before, after in itertools.pairwise(widths):
            layers += [
                nn.Conv2d(before, after, 5, padding=2, bias=False),
                _norm(after),
                nn.LeakyReLU(),
                nn.MaxPool2d(2),
            ]
        super().__init__(*layers, nn.Flatten())
        self.num_features = 4 * channels * (image_size // 8) ** 2


class LeNetDecoder(nn.Sequential):
    """The mirror image of `LeNet`: latent vectors [B, latent] to images [B, 3, S, S] in [0, 1].

    Args:
        latent: Length of the latent vectors.
        image_size: S, the side of the images in pixels; a multiple of 8.
        channels: Channels before the output layer, as many as in the first block of `LeNet`.
    """

    def __init__(self, latent: int, image_size: int, channels: int = 32) -> None:
        at_least("task.decoder", 1, latent=latent, channels=channels)
        side = image_size // 8
        widths = [4 * channels, 2 * channels, channels]
        layers: list[nn.Module] = [
            nn.Linear(latent, widths[0] * side**2, bias=False),
            nn.Unflatten(1, (widths[0], side, side)),
            nn.LeakyReLU(),
        ]
        for before, after in itertools.pairwise(widths):
            layers += [
                nn.Upsample(scale_factor=2),
                nn.ConvTranspose2d(before, after, 5, padding=2, bias=False),
                _norm(after),
                nn.LeakyReLU(),
            ]
        last = nn.ConvTranspose2d(widths[-1], 3, 5, padding=2, bias=False)
        super().__init__(*layers, nn.Upsample(scale_factor=2), last, nn.Sigmoid())


def contrast_normalised(pixels: Tensor) -> Tensor:
    """Subtracts the mean of each image [B, C, S, S], and divides by its mean absolute deviation: global normalisation.

    The divisor is at least 1e-3, so that images of a single colour become nearly zero.
    """
    centred = pixels - pixels.mean((1, 2, 3), keepdim=True)
    return centred / centred.abs().mean((1, 2, 3), keepdim=True).clamp(min=1e-3)
