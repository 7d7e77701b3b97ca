"""Transforms of image files, and of their masks by the same geometry, to tensors."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import functional as tvf

from lit_fedad.core.bounds import RANGES, at_least, pair, within
from lit_fedad.core.errors import UserError
from lit_fedad.core.sizes import IMAGENET_MEAN, IMAGENET_STD
from lit_fedad.data.input_files import check_pixels
from lit_fedad.data.masks import MaskFacts, measure, read_marks, resized_marks
from lit_fedad.data.pictures import read_picture

Fit = Literal["squeeze", "pad", "crop"]


@dataclass(frozen=True)
class ImageTransform:
    """Resizes (bicubic), crops and normalises images; masks follow: a pixel is anomalous where any share of it is.

    Attributes:
        size: Side of the square output in pixels, or its height and width.
        fit: How an image gets this shape. ``"squeeze"`` resizes both sides; ``"pad"`` keeps their ratio, with black
            beside the image; ``"crop"`` keeps it too, but only the centre of the image: a defect outside of it is
            never seen.
        resize: Length of the short side before the crop to a square; None for ``size``.
        mean: Mean of the red, green and blue channel in [0, 1], or of grey; see `each_channel`.
        std: Standard deviation of the channels.
        channels: 3 for colours, 1 for grey.
        page: Page or frame, from 0, that is read of each file; None where files hold one alone.

    Raises:
        UserError: A size is not positive, the crop is larger than the resized image, is no square or there is none,
            ``channels`` is another number, or ``mean`` and ``std`` do not fit it.
    """

    size: int | Sequence[int]
    resize: int | None = None
    fit: Fit = "squeeze"
    mean: tuple[float, ...] = IMAGENET_MEAN
    std: tuple[float, ...] = IMAGENET_STD
    channels: int = field(default=3, repr=False)  # left out of the fingerprint, which has as many means
    page: int | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        height, width = pair("image.size", self.size)
        within("image", *RANGES["image.size"], size=max(height, width))
        within("image", *RANGES["image.resize"], resize=self.resize)
        # 224 and [224, 224] get the same fingerprint.
        object.__setattr__(self, "size", height if height == width else (height, width))
        if self.fit not in get_args(Fit):
            raise UserError(f"image.fit={self.fit}: give {', '.join(get_args(Fit))}")
        if self.resize is not None and self.fit != "crop":
            raise UserError(f"image.resize={self.resize} belongs to image.fit=crop, not to {self.fit}")
        if self.resize is not None and height != width:
            raise UserError(
                f"image.resize={self.resize} is for square crops, not for image.size=[{height},{width}]; leave it out"
            )
        at_least("image", height, resize=self.resize)  # at least the side of the crop
        if self.channels not in (1, 3):
            raise UserError(f"transform channels={self.channels}: give 3, or 1 for grey images")
        within("image", *RANGES["image.page"], page=self.page)
        # Configurations give lists and whole numbers; the fingerprint needs tuples of floats.
        mean, std = each_channel("transform", self.mean, self.std, self.channels)
        object.__setattr__(self, "mean", mean)
        object.__setattr__(self, "std", std)

    @property
    def shape(self) -> tuple[int, int]:
        """Height and width of the output in pixels."""
        return pair("image.size", self.size)

    @property
    def fingerprint(self) -> str:
        """Stable text of everything that changes the output; part of the key of cached features."""
        page = "" if self.page is None else f" page {self.page}"
        return f"{self!r} v1{page}"  # raise the version when the same fields begin to give other pixels

    def image(self, path: Path) -> Tensor:
        """Reads and normalises an image, float32 [channels, H, W]; as `tensor` of `read_picture`."""
        return self.tensor(read_picture(path, self.page), path)

    def tensor(self, image: Image.Image, path: Path | None = None) -> Tensor:
        """Normalises a decoded image in eight-bit RGB, float32 [channels, H, W].

        Args:
            image: The image.
            path: Its file, for messages; None for an image in memory.

        Raises:
            UserError: It is so narrow that it would be huge before its crop.
        """
        image = image if self.channels == 3 else image.convert("L")
        return self._normalised(self.shown(image, path))

    def tensor_and_shown(self, image: Image.Image, path: Path | None = None) -> tuple[Tensor, Tensor]:
        """Returns what `tensor` and `shown` do; colours are resized once for both."""
        shown = self.shown(image, path)
        return (self._normalised(shown) if self.channels == 3 else self.tensor(image, path)), shown

    def raw(self, path: Path) -> Tensor:
        """Reads an image for figures, as `shown` of `read_picture`."""
        return self.shown(read_picture(path, self.page), path)

    def shown(self, image: Image.Image, path: Path | None = None) -> Tensor:
        """Brings a decoded image to the geometry of `tensor`, uint8 [H, W, 3] or grey [H, W]; arguments as there."""
        height, width = self._scaled(image.height, image.width, path)
        image = tvf.resize(image, [height, width], InterpolationMode.BICUBIC)
        # center_crop pads what is smaller than the crop with zeros.
        return torch.from_numpy(
            np.array(image if self.fit == "squeeze" else tvf.center_crop(image, list(self.shape)))
        )

    def mask(self, path: Path | None, image_path: Path) -> Tensor:
        """Reads the mask of an image.

        Args:
            path: The mask, or a folder of masks, whose union counts; None for an image without anomalous pixels.
            image_path: The image it belongs to, whose size it must have.

        Returns:
            1 where any share of the pixel is anomalous, uint8 [H, W].

        Raises:
            UserError: As `read_marks`.
        """
        if path is None:
            return torch.zeros(self.shape, dtype=torch.uint8)
        return self._fit_mask(read_marks(path, image_path, self.page).pixels, image_path)

    def measured_mask(self, path: Path, image_path: Path) -> tuple[Tensor, MaskFacts]:
        """Reads the mask of an image as `mask` does, and computes its `MaskFacts`."""
        marks = read_marks(path, image_path, self.page)
        mask = self._fit_mask(marks.pixels, image_path)
        return mask, measure(marks, int(mask.sum()), mask.numel())

    def _normalised(self, pixels: Tensor) -> Tensor:
        """Normalises pixels uint8 [H, W] or [H, W, channels] to float32 [channels, H, W]."""
        scaled = pixels.view(*self.shape, self.channels).permute(2, 0, 1) / 255
        mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (self.mean, self.std))
        return (scaled - mean) / std

    def _fit_mask(self, pixels: np.ndarray, image_path: Path) -> Tensor:
        """Brings marked pixels to the geometry of the image: uint8 [H, W]."""
        height, width = pixels.shape
        scaled = self._scaled(height, width, image_path)
        marked = torch.from_numpy(resized_marks(pixels, *scaled).astype(np.uint8))
        return marked if self.fit == "squeeze" else tvf.center_crop(marked[None], list(self.shape))[0]

    def _scaled(self, height: int, width: int, path: Path | None) -> tuple[int, int]:
        """Computes height and width of an image before the crop or padding; refuses what memory may not hold."""
        if self.fit == "squeeze":
            return self.shape
        scaled_height, scaled_width = (self.resize, self.resize) if self.resize else self.shape
        # The ratio of the sides is kept: either the height decides, or the width.
        if (scaled_height * width <= scaled_width * height) == (self.fit == "pad"):
            scaled_width = max(1, int(scaled_height * width / height))
        else:
            scaled_height = max(1, int(scaled_width * height / width))
        try:
            check_pixels(scaled_width, scaled_height)
        except OverflowError as error:
            raise UserError(
                f"{path or 'the image'}: {width}x{height} pixels are too narrow for image.fit=crop, which would make"
                f" them {error}; give image.fit=squeeze or pad"
            ) from None
        return scaled_height, scaled_width


def each_channel(
    name: str, mean: Sequence[float], std: Sequence[float], channels: int
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Expands mean and standard deviation, given once or for each channel, to every channel.

    Args:
        name: Name of the set or transform, for messages.
        mean: Means.
        std: Standard deviations.
        channels: Number of channels.

    Raises:
        UserError: There are other numbers of them, or a deviation is not positive.

    Example:
        >>> each_channel("photographs", [0.5], [1, 2, 3], channels=3)
        ((0.5, 0.5, 0.5), (1.0, 2.0, 3.0))
    """
    if not {len(mean), len(std)} <= {1, channels} or min(std) <= 0:
        numbers = "one number each" if channels == 1 else f"one number or {channels} each"
        raise UserError(f"{name} mean={list(mean)}, std={list(std)}: give {numbers}, std above 0")
    means, deviations = (tuple(map(float, (*values,) * channels))[:channels] for values in (mean, std))
    return means, deviations
