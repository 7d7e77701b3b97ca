"""Image sets without files, for tests that read no image, and small images for those that do."""

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from lit_fedad.data.sample import ImageSet, Sample


def image_set(*counts: int) -> ImageSet:
    """Builds a set of so many training images of the categories a, b, ..., interleaved, and no test image."""
    samples = [
        Sample(Path(f"{category}/{i:04}.png"), category)
        for category, count in zip("abcdefghij", counts, strict=False)
        for i in range(count)
    ]
    return ImageSet("toy", tuple(sorted(samples, key=lambda sample: sample.path.name)), ())


def picture(path: Path, value: int | tuple[int, int, int] = 90, size=(16, 12), mark: int = 0) -> None:
    """Writes an image of one grey value or colour; a mark is the value of its pixel at (3, 5)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    image = Image.new("L" if isinstance(value, int) else "RGB", size, value)
    if mark:
        image.putpixel((3, 5), mark)
    image.save(path)


def pillow(pixels: np.ndarray | Image.Image, form: str = "PNG", mode: str | None = None, **options) -> bytes:
    """Encodes an image by Pillow."""
    image = pixels if isinstance(pixels, Image.Image) else Image.fromarray(pixels)
    file = io.BytesIO()
    (image if mode is None else image.convert(mode)).save(file, form, **options)
    return file.getvalue()


def tiff(pixels: np.ndarray, **options) -> bytes:
    """Encodes an image by tifffile."""
    file = io.BytesIO()
    pytest.importorskip("tifffile").imwrite(file, pixels, **options)
    return file.getvalue()


def encoded(images: np.ndarray, form: str = "PNG", **options) -> dict[str, np.ndarray]:
    """Encodes images one after another, under the keys of a packed file; PNG keeps the pixels to compare with."""
    files = [pillow(image, form, **options) for image in images]
    return {
        "jpeg": np.frombuffer(b"".join(files), np.uint8),
        "offsets": np.cumsum([0, *map(len, files)]),
    }
