"""LeNet without biases, as Deep SVDD needs it, and its mirror image."""

import itertools

from torch import Tensor, nn

from lit_fedad.core.bounds import at_least
from lit_fedad.core.errors import UserError

_EPSILON = 1e-4


def _norm(channels: int) -> nn.BatchNorm2d:
    return nn.BatchNorm2d(channels, eps=_EPSILON, affine=False)


class LeNet(nn.Sequential):
    """Three blocks of a 5x5 convolution, norm, leaky ReLU and max-pooling: images to features [B, C].

    The encoder of Deep SVDD for CIFAR-10 (Ruff et al., ICML 2018). Nothing in it adds a constant, neither a bias nor an
    affine normalisation: with one, all images could be mapped to the centre.

    Args:
        image_size: S, the side of the images in pixels; a multiple of 8.
        channels: Channels of the first block; the others have two and four times as many.
        inputs: Channels of the images.

    Attributes:
        num_features: Number of features C: 2,048 for images of 32 pixels.

    Raises:
        UserError: If the side is no multiple of 8.

    Example:
        >>> import torch
        >>> LeNet(image_size=32)(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 2048])
    """

    def __init__(self, image_size: int, channels: int = 32, inputs: int = 3) -> None:
        at_least("encoder", 1, channels=channels, inputs=inputs)
        if image_size < 8 or image_size % 8:
            raise UserError(
                f"image.size={image_size}: LeNet halves the side three times; give a multiple of 8"
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
        channels: Channels of the last block but one, as of the first block of `LeNet`.

    Example:
        >>> import torch
        >>> LeNetDecoder(latent=8, image_size=16, channels=4)(torch.zeros(2, 8)).shape
        torch.Size([2, 3, 16, 16])
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
    """Subtracts each image's mean, and divides by its mean absolute deviation: global contrast normalisation.

    Args:
        pixels: Images [B, C, S, S].

    Returns:
        Images of mean 0 and mean absolute value 1; nearly zero where an image is of one colour.

    Example:
        >>> import torch
        >>> contrast_normalised(torch.tensor([[[[0.0, 4.0]]]])).flatten().tolist()
        [-1.0, 1.0]
    """
    centred = pixels - pixels.mean((1, 2, 3), keepdim=True)
    return centred / centred.abs().mean((1, 2, 3), keepdim=True).clamp(min=1e-3)
