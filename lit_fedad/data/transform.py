"""Transforms of image files, and of their masks by the same geometry, to tensors."""

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import functional as tvf

from lit_fedad.core.bounds import pair
from lit_fedad.core.errors import UserError
from lit_fedad.data.dicom import read_dicom
from lit_fedad.data.folders import images_in
from lit_fedad.data.input_files import check_pixels, check_regular
from lit_fedad.data.sample import DICOM_SUFFIXES

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)

Fit = Literal["squeeze", "pad", "crop"]

_TWELVE_BITS = 4095
_DARK = (
    "has images of 16 bits that are nearly black, with no value above 4095 of 65535; if they hold 8 or 12 bits, save"
    " them with 8, or scaled to 16"
)


@dataclass(frozen=True)
class ImageTransform:
    """Resizes (bicubic), crops and normalises images; masks follow with nearest-neighbour sampling.

    Attributes:
        size: Side of the square output in pixels, or its height and width.
        fit: How an image gets this shape. ``"squeeze"`` resizes both sides; ``"pad"`` keeps their ratio, with black
            beside the image; ``"crop"`` keeps it too, and only the centre of the image: what lies outside, a defect
            perhaps, is never seen.
        resize: Length of the short side before the crop to a square; None for ``size``.
        mean: Mean of the red, green and blue channel in [0, 1], or of grey; see `each_channel`.
        std: Standard deviation of the channels.
        channels: 3 for colours, 1 for grey.

    Raises:
        UserError: A size is not positive, the crop is larger than the resized image, is no square or there is none,
            ``channels`` is another number, or ``mean`` and ``std`` do not fit it.
    """

    size: int | Sequence[int]
    resize: int | None = None
    fit: Fit = "squeeze"
    mean: tuple[float, ...] = IMAGENET_MEAN
    std: tuple[float, ...] = IMAGENET_STD
    channels: int = field(default=3, repr=False)  # there are as many means, which the fingerprint names

    def __post_init__(self) -> None:
        height, width = pair("image.size", self.size)
        # One spelling makes one fingerprint.
        object.__setattr__(self, "size", height if height == width else (height, width))
        if self.fit not in get_args(Fit):
            raise UserError(f"image.fit={self.fit}: give {', '.join(get_args(Fit))}")
        if self.resize is not None and self.fit != "crop":
            raise UserError(f"image.resize={self.resize} belongs to image.fit=crop, not to {self.fit}")
        if self.resize is not None and height != width:
            raise UserError(
                f"image.resize={self.resize} is for square crops, not for image.size=[{height},{width}]; leave it out"
            )
        if self.resize is not None and self.resize < height:
            raise UserError(
                f"transform resize={self.resize} is below size={self.size}, the side of the crop;"
                " raise resize, or leave it out"
            )
        if self.channels not in (1, 3):
            raise UserError(f"transform channels={self.channels}: give 3, or 1 for grey images")
        # Configurations hand over lists and whole numbers.
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
        return f"{self!r} v1"  # raise the version when the same fields begin to give other pixels

    def image(self, path: Path) -> Tensor:
        """Reads and normalises an image.

        Returns:
            Normalised image, float32 [channels, H, W].

        Raises:
            UserError: The file cannot be read as an image.
        """
        return self.tensor(to_rgb(_open(path), path))

    def tensor(self, image: Image.Image) -> Tensor:
        """Normalises a decoded image.

        Args:
            image: From `to_rgb`.

        Returns:
            Normalised image, float32 [channels, H, W].
        """
        pixels = self._fit(image if self.channels == 3 else image.convert("L"), InterpolationMode.BICUBIC)
        scaled = pixels.view(*self.shape, self.channels).permute(2, 0, 1) / 255
        mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (self.mean, self.std))
        return (scaled - mean) / std

    def raw(self, path: Path) -> Tensor:
        """Reads an image for figures: the same geometry without normalisation.

        Returns:
            RGB image, uint8 [H, W, 3].

        Raises:
            UserError: The file cannot be read as an image.
        """
        return self.shown(to_rgb(_open(path), path))

    def shown(self, image: Image.Image) -> Tensor:
        """Brings a decoded image to the geometry of `tensor`, without normalisation.

        Args:
            image: From `to_rgb`.

        Returns:
            RGB image, uint8 [H, W, 3].
        """
        return self._fit(image, InterpolationMode.BICUBIC)

    def mask(self, path: Path | None, image_path: Path) -> Tensor:
        """Reads the mask of an image.

        Every value above 0 is anomalous; in a JPEG, which smears edges, every value from 128.

        Args:
            path: The mask, or a folder of masks, whose union counts; None for an image without anomalous pixels.
            image_path: The image it belongs to, whose size it must have.

        Returns:
            1 where the pixel is anomalous, uint8 [H, W].

        Raises:
            UserError: The file cannot be read, or its size is not that of the image.
        """
        if path is None:
            return torch.zeros(self.shape, dtype=torch.uint8)
        if path.is_dir():
            return torch.stack([self.mask(part, image_path) for part in images_in(path)]).amax(0)
        mask, image_size = _open(path), _open(image_path).size
        if mask.size != image_size:
            raise UserError(
                f"{path}: the mask is {mask.width}x{mask.height} but its image {image_path} is"
                f" {image_size[0]}x{image_size[1]}; save the mask at the size of the image"
            )
        # Opacity and palette indices say nothing about anomalies, colours do.
        values = np.asarray(mask.convert("RGB") if mask.mode == "P" or "A" in mask.mode else mask)
        brightest = values.max(axis=2) if values.ndim == 3 else values
        anomalous = brightest >= 128 if Path(path).suffix.lower() in {".jpg", ".jpeg"} else brightest > 0
        return self._fit(Image.fromarray(anomalous.astype(np.uint8)), InterpolationMode.NEAREST)

    def _fit(self, image: Image.Image, interpolation: InterpolationMode) -> Tensor:
        """The geometry, the same for images and masks: uint8 [H, W] or [H, W, channels]."""
        shape = list(self.shape)
        if self.fit == "squeeze":
            return torch.from_numpy(np.array(tvf.resize(image, shape, interpolation)))
        height, width = (self.resize, self.resize) if self.resize else shape
        # The ratio of the sides is kept: either the height decides, or the width.
        by_height = (height * image.width <= width * image.height) == (self.fit == "pad")
        if by_height:
            width = max(1, int(height * image.width / image.height))
        else:
            height = max(1, int(width * image.height / image.width))
        # center_crop pads what is smaller than the crop with zeros.
        image = tvf.center_crop(tvf.resize(image, [height, width], interpolation), shape)
        return torch.from_numpy(np.array(image))


def emptied_masks(pairs: Iterable[tuple[Path, Path]], transform: ImageTransform) -> list[Path]:
    """Lists the images whose defect a transform leaves out.

    Args:
        pairs: Mask and image of anomalous samples.
        transform: The transform.
    """
    return [image for mask, image in pairs if not transform.mask(mask, image).any()]


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


def _open(path: Path) -> Image.Image:
    """The decoded image, turned the way its EXIF orientation says."""
    try:
        check_regular(path)
        if Path(path).suffix.lower() in DICOM_SUFFIXES:
            return read_dicom(Path(path))
        with Image.open(path) as image:
            check_pixels(*image.size)
            image.load()
            return ImageOps.exif_transpose(image)
    except UserError:
        raise
    except FileNotFoundError:
        raise UserError(f"{path}: no such image file; was it moved after the set was read?") from None
    # Pillow reports damage through exceptions of many kinds, a decompression bomb among them.
    except Exception as error:
        raise UserError(
            f"{path}: cannot be read as an image ({error}); replace the file or remove it"
        ) from error


def to_rgb(image: Image.Image, path: Path) -> Image.Image:
    """Converts a decoded image to eight-bit RGB: transparent pixels become white, sixteen bits are scaled to eight.

    Args:
        image: The image.
        path: Its file, for messages.

    Raises:
        UserError: Its pixels have no fixed range.
    """
    if image.mode == "F" or image.mode.startswith("I"):
        values = np.asarray(image)
        # Pillow opens some 16-bit files with 32-bit pixels, so it is the values that count.
        if image.mode == "F" or values.min() < 0 or values.max() > 65535:
            raise UserError(
                f"{path}: its pixels are float or 32-bit, of no fixed range; save it with 8 or 16 bits"
            )
        if 0 < values.max() <= _TWELVE_BITS:
            # The same text for all images of a folder: it is shown once.
            warnings.warn(f"{Path(path).parent}: {_DARK}", stacklevel=2)
        image = Image.fromarray(((values.astype(np.uint32) + 128) // 257).astype(np.uint8))
    if image.has_transparency_data:
        background = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(background, image.convert("RGBA"))
    return image.convert("RGB")
