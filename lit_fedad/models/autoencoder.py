"""Decoder of an autoencoder: from latent vectors to images."""

from torch import nn
from torchvision.models.resnet import BasicBlock, conv1x1

from lit_fedad.core.bounds import at_least
from lit_fedad.core.errors import UserError
from lit_fedad.models.convnets import BatchNorm

SMALLEST, LARGEST = 4, 7
"""Sides of the map that the decoder starts from."""


def first_side(image_size: int) -> int:
    """Finds the side from 4 to 7 that becomes ``image_size`` by doubling.

    Raises:
        UserError: If there is no such side.

    Example:
        >>> [first_side(size) for size in (28, 32, 64, 96, 224)]
        [7, 4, 4, 6, 7]
    """
    side = image_size
    while side > LARGEST and side % 2 == 0:
        side //= 2
    if not SMALLEST <= side <= LARGEST:
        raise UserError(
            f"image.size={image_size}: the decoder doubles a map of side {SMALLEST} to {LARGEST};"
            " take 32, 64, 96, 128, 160, 192, 224 or 256"
        )
    return side


class Decoder(nn.Sequential):
    """Residual upsampling blocks: latent vectors [B, latent] to images [B, 3, S, S] in [0, 1].

    A linear layer gives the first map, of side 4 to 7; each block doubles the side and halves the channels. Of the
    decoder of FADngs' autoencoder only "residual upsampling blocks, sigmoid" is known: widths are our choice.

    Args:
        latent: Length of the latent vector.
        image_size: S, the side of the images in pixels: 4 to 7 times a power of two.
        channels: Channels of the first map; blocks have at least 16.

    Raises:
        UserError: If the image size is none that the decoder can reach.

    Example:
        >>> import torch
        >>> Decoder(latent=8, image_size=28, channels=32)(torch.zeros(2, 8)).shape
        torch.Size([2, 3, 28, 28])
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
