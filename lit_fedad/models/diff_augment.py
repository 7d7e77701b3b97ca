"""Differentiable augmentation that is the same for real and synthetic images of a class."""

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F


class Draw(NamedTuple):
    """Random operations for G groups of images.

    Attributes:
        operation: Position in ``OPERATIONS``, int64 [G].
        numbers: Random numbers of the operation, uniform in [0, 1), float32 [G, 3].
    """

    operation: Tensor
    numbers: Tensor


def draw(groups: int, generator: torch.Generator | None = None) -> Draw:
    """Draws one operation for each group, all equally likely.

    Args:
        groups: Number of groups G.
        generator: Generator on the CPU; None for torch's global one.
    """
    operation = torch.randint(len(OPERATIONS), (groups,), generator=generator)
    return Draw(operation, torch.rand(groups, 3, generator=generator))


def diff_augment(images: Tensor, drawn: Draw, group: Tensor) -> Tensor:
    """Changes the images of a group in the same way, differentiably.

    It applies one of six operations, with the strengths of data set condensation. Sizes are rounded to whole pixels;
    pixels from beyond the border, or cut out, are zero (the mean colour of normalised images).

    - colour: brightness, a number of -0.5 to 0.5 added; then saturation, a factor of 0 to 2 about each pixel's mean
      over channels; then contrast, a factor of 0.5 to 1.5 about the image's mean.
    - crop: a shift of up to an eighth of the side in each direction.
    - cutout: a square of half the side is set to zero. Its centre is uniform, so that it may extend beyond the image.
    - flip: the image is mirrored with probability 0.5.
    - scale: width and height change independently; the ratio of the visible window to the image is 1/1.2 to 1.2.
    - rotate: by -15 to 15 degrees.

    Args:
        images: Images [B, C, H, W].
        drawn: Draws of G groups.
        group: Each image's group, int64 [B]; ``arange(B)`` gives every image its own draw.

    Returns:
        Images [B, C, H, W].

    Source:
        Differentiable siamese augmentation: Zhao and Bilen 2021, arXiv:2102.08259, section 3.2.
    """
    group = group.to(drawn.operation.device)
    operation = drawn.operation[group]
    order = operation.argsort()
    sizes = operation.bincount(minlength=len(OPERATIONS)).tolist()
    numbers = drawn.numbers[group[order]].to(images)
    parts = zip(OPERATIONS, images[order.to(images.device)].split(sizes), numbers.split(sizes), strict=True)
    augmented = torch.cat([operate(part, part_numbers) for operate, part, part_numbers in parts if len(part)])
    return augmented[order.argsort().to(images.device)]


def _colour(images: Tensor, numbers: Tensor) -> Tensor:
    brightness, saturation, contrast = numbers[:, :, None, None, None].unbind(1)
    images = images + (brightness - 0.5)
    images = torch.lerp(images.mean(1, keepdim=True), images, 2 * saturation)
    return torch.lerp(images.mean((1, 2, 3), keepdim=True), images, 0.5 + contrast)


def _crop(images: Tensor, numbers: Tensor) -> Tensor:
    count, channels, height, width = images.shape
    across, down = (width + 4) // 8, (height + 4) // 8
    padded = F.pad(images, [across, across, down, down])
    rows = (numbers[:, :1] * (2 * down + 1)).long() + torch.arange(height, device=images.device)
    columns = (numbers[:, 1:2] * (2 * across + 1)).long() + torch.arange(width, device=images.device)
    pixels = rows[:, :, None] * padded.shape[3] + columns[:, None, :]
    return padded.flatten(2).gather(2, pixels.view(count, 1, -1).expand(-1, channels, -1)).view_as(images)


def _cutout(images: Tensor, numbers: Tensor) -> Tensor:
    height, width = images.shape[2:]
    rows, columns = _cut(height, numbers[:, :1]), _cut(width, numbers[:, 1:2])
    return images.masked_fill((rows[:, :, None] & columns[:, None, :]).unsqueeze(1), 0)


def _cut(side: int, number: Tensor) -> Tensor:
    """Returns which pixels along a side lie in the square, bool [B, side]."""
    square = (side + 1) // 2
    first = (number * (side + 1 - square % 2)).floor() - square // 2
    pixel = torch.arange(side, device=number.device)
    return (first <= pixel) & (pixel < first + square)


def _flip(images: Tensor, numbers: Tensor) -> Tensor:
    return torch.where(numbers[:, :1, None, None] < 0.5, images.flip(3), images)


def _scale(images: Tensor, numbers: Tensor) -> Tensor:
    smallest, largest = 1 / 1.2, 1.2
    return _resample(images, torch.diag_embed(smallest + numbers[:, :2] * (largest - smallest)))


def _rotate(images: Tensor, numbers: Tensor) -> Tensor:
    angle = (2 * numbers[:, 0] - 1) * math.radians(15)
    cos, sin = angle.cos(), angle.sin()
    return _resample(images, torch.stack([cos, -sin, sin, cos], dim=1).view(-1, 2, 2))


def _resample(images: Tensor, windows: Tensor) -> Tensor:
    """Resamples images bilinearly through windows: linear maps [B, 2, 2] of coordinates (x, y) about the centre."""
    grid = F.affine_grid(F.pad(windows, [0, 1]), list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, align_corners=False)


OPERATIONS = (_colour, _crop, _cutout, _flip, _scale, _rotate)
