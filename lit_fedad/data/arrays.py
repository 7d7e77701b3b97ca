"""Images as uint8 arrays: random draws, scaling and reading."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import functional as tvf

from lit_fedad.contracts.randomness import numpy_generator
from lit_fedad.core.errors import UserError
from lit_fedad.data.transform import ImageTransform


def draw(population: int, limit: int | None, key: str, *seed: object) -> np.ndarray:
    """Draws the positions of at most ``limit`` of so many images.

    Args:
        population: Number of images.
        limit: At most this many; None takes all.
        key: Configuration key of the limit, for messages and for the seed.
        seed: Seed of the draw; a smaller draw is part of a larger one.

    Returns:
        Positions in ascending order, int64 [drawn].

    Raises:
        UserError: If the limit is below 0.

    Example:
        >>> len(draw(10, 4, "count", 0)), draw(3, None, "count", 0).tolist()
        (4, [0, 1, 2])
    """
    if limit is not None and limit < 0:
        raise UserError(f"{key}={limit}: give 0 or more, or null to take every image")
    if limit is None or limit >= population:
        return np.arange(population)
    return np.sort(numpy_generator(key, *seed).permutation(population)[:limit])


def resized(images: Tensor, height: int, width: int) -> Tensor:
    """Scales images bilinearly, antialiased: uint8 [N, 3, H, W] to [N, 3, height, width]."""
    if not len(images):
        return images.new_empty(0, 3, height, width)
    # Returns its argument where there is nothing to do.
    return tvf.resize(images, [height, width], InterpolationMode.BILINEAR, antialias=True)


def read_images(paths: Sequence[Path], size: int) -> Tensor:
    """Reads image files; the short side is scaled to ``size`` (bicubic, antialiased) and the centre is cropped.

    Args:
        paths: N image files.
        size: Side of the square images in pixels.

    Returns:
        RGB images, uint8 [N, 3, size, size].

    Raises:
        UserError: A file cannot be read as an image.
    """
    transform = ImageTransform(size, fit="crop")
    images = torch.empty(len(paths), 3, size, size, dtype=torch.uint8)
    for image, path in zip(images, paths, strict=True):
        image.copy_(transform.raw(path).permute(2, 0, 1))
    return images
