"""Random views of images."""

import torch
from torch import Tensor
from torch.nn import functional as F


def crop_and_flip(images: Tensor, padding: int = 4) -> Tensor:
    """Shifts each image at random and mirrors it with probability 0.5, as is usual for CIFAR.

    Images are padded with zeros (of normalised images: the mean colour) and cropped to their size at a random
    position each. Draws come from torch's global CPU generator, whatever the device.

    Args:
        images: Images [B, C, H, W].
        padding: Pixels on every side: the largest shift.

    Returns:
        Views [B, C, H, W].
    """
    count, channels, height, width = images.shape
    top, left = torch.randint(2 * padding + 1, (2, count, 1))
    rows, columns = top + torch.arange(height), left + torch.arange(width)
    columns = torch.where(torch.rand(count, 1) < 0.5, columns.flip(1), columns)
    image, channel = torch.arange(count)[:, None, None, None], torch.arange(channels)[:, None, None]
    places = (image, channel, rows[:, None, :, None], columns[:, None, None, :])
    return F.pad(images, [padding] * 4)[tuple(place.to(images.device) for place in places)]
