"""A conditional DCGAN: a generator of images of given labels, and a discriminator that gets the label too.

Layers are those of DCGAN (Radford et al., ICLR 2016): transposed convolutions from a 4 x 4 map, and their mirror image.
Batch normalisation always uses the batch's own statistics, so that a network has no state besides its weights.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lit_fedad.core.bounds import at_least

_FIRST_SIDE = 4  # pixels along a side of the smallest map
_INITIAL_STD = 0.02  # standard deviation of initial weights, as in DCGAN


def canvas_side(image_size: int) -> int:
    """Returns the smallest of 8, 16, 32, ... pixels that is no smaller than an image's side."""
    side = 2 * _FIRST_SIDE
    while side < image_size:
        side *= 2
    return side


def _widths(image_size: int, width: int, section: str) -> list[int]:
    """Returns the channels of the maps of 4, 8, ... pixels: ``width``, then half as many at each doubling."""
    doublings = (canvas_side(image_size) // _FIRST_SIDE).bit_length() - 1
    at_least(section, 2 ** (doublings - 1), width=width)
    return [width // 2**step for step in range(doublings)]


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Conv2d | nn.ConvTranspose2d):
        nn.init.normal_(module.weight, std=_INITIAL_STD)


class ConditionalGenerator(nn.Module):
    """Generates images of given labels from noise, normalised like the images of the task's loaders.

    Noise is multiplied with an embedding of the label, as in DFRD (Luo et al., NeurIPS 2023). The first map is not
    normalised. Images whose side is no power of two are cut from the middle of larger ones.

    Args:
        classes: Number of classes K.
        image_size: S, the side of the images in pixels.
        channels: Channels of the images.
        latent: Length N of a noise vector.
        width: Channels of the 4 x 4 map.
        mean: Mean of each channel in [0, 1], by which images are normalised.
        std: Standard deviation of each channel.
        section: Section of the configuration that has ``latent`` and ``width``, for error messages.

    Raises:
        UserError: If a number is too small.
    """

    mean: Tensor
    std: Tensor

    def __init__(
        self,
        classes: int,
        image_size: int,
        channels: int = 3,
        latent: int = 100,
        width: int = 512,
        mean: Sequence[float] = (0.5, 0.5, 0.5),
        std: Sequence[float] = (0.5, 0.5, 0.5),
        section: str = "method.client",
    ) -> None:
        super().__init__()
        at_least("image", 1, size=image_size, channels=channels)
        at_least(section, 1, latent=latent)
        self.latent, self.image_size = latent, image_size
        self.embedding = nn.Embedding(classes, latent)
        widths = _widths(image_size, width, section)
        layers: list[nn.Module] = [nn.ConvTranspose2d(latent, width, _FIRST_SIDE, bias=False), nn.ReLU()]
        for before, after in pairwise(widths):
            layers += [
                nn.ConvTranspose2d(before, after, 4, stride=2, padding=1, bias=False),
                nn.BatchNorm2d(after, track_running_stats=False),
                nn.ReLU(),
            ]
        layers += [nn.ConvTranspose2d(widths[-1], channels, 4, stride=2, padding=1, bias=False), nn.Tanh()]
        self.layers = nn.Sequential(*layers)
        self.layers.apply(_initialise)
        for name, values in (("mean", mean), ("std", std)):
            self.register_buffer(name, torch.tensor(list(values)).view(-1, 1, 1), persistent=False)

    def forward(self, labels: Tensor, noise: Tensor) -> Tensor:
        """Generates normalised images [B, C, S, S] of labels [B], from standard normal noise [B, N]."""
        return self.decode(self.mixed(labels, noise))

    def mixed(self, labels: Tensor, noise: Tensor) -> Tensor:
        """Multiplies noise [B, N] with the embeddings of labels [B]."""
        return noise * self.embedding(labels)

    def decode(self, mixed: Tensor) -> Tensor:
        """Generates normalised images [B, C, S, S] from products of noise and label embedding [B, N] (`mixed`)."""
        whole = (self.layers(mixed[:, :, None, None]) + 1) / 2
        first = (whole.shape[-1] - self.image_size) // 2
        last = first + self.image_size
        return (whole[:, :, first:last, first:last] - self.mean) / self.std


class ConditionalDiscriminator(nn.Module):
    """Classifies images as real or generated, given their labels: logits [B], positive for real.

    The label is given as further channels of the image, one for each class: all 1 for its own class, and 0 for others.

    Args:
        classes: Number of classes K.
        image_size: S, the side of the images in pixels; images whose side is no power of two are padded with zeros.
        channels: Channels of the images.
        width: Channels of the 4 x 4 map.

    Raises:
        UserError: If a number is too small.
    """

    def __init__(
        self,
        classes: int,
        image_size: int,
        channels: int = 3,
        width: int = 512,
    ) -> None:
        super().__init__()
        at_least("image", 1, size=image_size, channels=channels)
        self.classes, self.padding = classes, canvas_side(image_size) - image_size
        widths = _widths(image_size, width, "method.client")[::-1]
        layers: list[nn.Module] = [
            nn.Conv2d(channels + classes, widths[0], 4, stride=2, padding=1, bias=False),
            nn.LeakyReLU(0.2),
        ]
        for before, after in pairwise(widths):
            layers += [
                nn.Conv2d(before, after, 4, stride=2, padding=1, bias=False),
                nn.BatchNorm2d(after, track_running_stats=False),
                nn.LeakyReLU(0.2),
            ]
        self.layers = nn.Sequential(*layers, nn.Conv2d(width, 1, _FIRST_SIDE, bias=False), nn.Flatten(0))
        self.layers.apply(_initialise)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        """Computes logits [B] of normalised images [B, C, S, S] with labels [B]."""
        planes = F.one_hot(labels, self.classes).to(images)[:, :, None, None]
        labelled = torch.cat([images, planes.expand(-1, -1, *images.shape[2:])], 1)
        before = self.padding // 2
        after = self.padding - before
        return self.layers(F.pad(labelled, (before, after, before, after)))
