"""Condensed images as clients send them, and as the server trains on them."""

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from lit_fedad.contracts import Message
from lit_fedad.core.errors import UserError

IMAGES, CLASSES, COUNTS = "images", "classes", "images_per_class"


class Knowledge(NamedTuple):
    """Condensed images of a round, as clients send them.

    Attributes:
        images: Images [n, C, H, W], uint8 or float32 in the range of pixels.
        labels: Labels, int64 [n].
    """

    images: Tensor
    labels: Tensor


def joined(messages: Mapping[int, Message]) -> Knowledge:
    """Concatenates the images of several clients, in client order.

    Args:
        messages: Uploads by client.

    Raises:
        UserError: If there is no image, or image sizes differ between clients.
    """
    senders = {client: message for client, message in messages.items() if len(message[IMAGES])}
    if not senders:
        raise UserError(
            "no client owns a class: each has fewer than method.client.min_class_images images of every one; lower it,"
            " or deal images to fewer clients"
        )
    first, *others = senders
    shape = senders[first][IMAGES].shape[1:]
    for client in others:
        if senders[client][IMAGES].shape[1:] != shape:
            other_shape = tuple(senders[client][IMAGES].shape[1:])
            raise UserError(
                f"clients sent images of the sizes {tuple(shape)} and {other_shape}; bring them to one size"
            )
    images = [message[IMAGES] for message in senders.values()]
    labels = [message[CLASSES].repeat_interleave(message[COUNTS]) for message in senders.values()]
    return Knowledge(torch.cat(images), torch.cat(labels))


def synthetic_images(size: int, share: float, minimum: int) -> int:
    """Returns the number of synthetic images of a class.

    Args:
        size: Number of real images of the class.
        share: Ratio of synthetic to real images; the number is rounded up.
        minimum: Fewest synthetic images.
    """
    return max(minimum, math.ceil(share * size))


def as_bytes(pixels: Tensor) -> Tensor:
    """Converts pixels in [0, 1] to uint8; values out of this range are clipped."""
    return (255 * pixels.clamp(0, 1)).round().to(torch.uint8)


# Checkpoints of servers hold Knowledge. They are read as data (`weights_only`), which refuses unregistered classes.
torch.serialization.add_safe_globals([Knowledge])
