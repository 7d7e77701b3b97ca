"""Checks of an image set: every file that training would read, and the split."""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from PIL import Image

from lit_fedad.core.errors import UserError
from lit_fedad.data.cards import Counts
from lit_fedad.data.folders import images_in
from lit_fedad.data.regions import saturation_areas
from lit_fedad.data.sample import ImageSet, Sample
from lit_fedad.data.transform import ImageTransform

_READER = ImageTransform(size=1)  # decodes and converts as training does; what it returns is dropped


class Problem(NamedTuple):
    """A fault of an image set.

    Attributes:
        category: Product type that it concerns.
        message: One line that begins with the file or, for a whole category, with its name.
    """

    category: str
    message: str


def count(images: ImageSet) -> dict[str, Counts]:
    """Counts the images of each category, categories in order of first appearance."""
    train = Counter(sample.category for sample in images.train)
    test = Counter((sample.category, sample.label) for sample in images.test)
    return {name: Counts(train[name], test[name, 0], test[name, 1]) for name in images.categories}


def check(
    images: ImageSet,
    official: Mapping[str, Counts] | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Problem]:
    """Reads every file of a set and reports its faults.

    Faults are images and masks that cannot be decoded, masks that do not fit their image or its label, test images
    that are training images as well (byte for byte), categories whose test images all have one label, and sizes
    other than the official ones.

    Args:
        images: The set.
        official: Category -> official size, for the categories where it is known.
        progress: Called with the number of images read and of all images.

    Returns:
        The problems: of files in the order of the set, of leaked test images, of whole categories.
    """
    samples = [*images.train, *images.test]
    problems: list[Problem] = []
    digests: dict[Path, bytes] = {}
    with ThreadPoolExecutor() as pool:
        readings = zip(samples, pool.map(_read, samples), strict=True)
        for done, (sample, (digest, messages)) in enumerate(readings, 1):
            problems += [Problem(sample.category, message) for message in messages]
            if digest is not None:
                digests[sample.path] = digest
            progress(done, len(samples))
    return [*problems, *_leaks(images, digests), *_sizes(count(images), official or {})]


def _read(sample: Sample) -> tuple[bytes | None, list[str]]:
    """The hash of an image file, None if it cannot be decoded, and what is wrong with image and mask."""
    digest, messages = None, []
    try:
        _READER.raw(sample.path)
        with sample.path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").digest()
    except UserError as error:
        messages.append(str(error))
    if sample.mask is not None:
        try:
            files = images_in(sample.mask) if sample.mask.is_dir() else [sample.mask]
            # Without its image, a mask can still be checked for everything but its size.
            found = [_marks(file, file if messages else sample.path) for file in files]
            marks = any(found)
            if not messages:
                saturation_areas(sample, _READER)
            if sample.label and not marks:
                messages.append(f"{sample.mask}: marks no pixel of the anomalous image {sample.path}")
            if marks and not sample.label:
                messages.append(f"{sample.mask}: marks pixels of {sample.path}, which counts as good")
        except UserError as error:
            messages.append(str(error))
    return digest, messages


def _marks(mask: Path, image: Path) -> bool:
    """Whether a mask that fits its image marks any pixel."""
    _READER.mask(mask, image)  # refuses what training would refuse
    with Image.open(mask) as opened:
        side = max(opened.size)  # scaled up, if at all: no marked pixel is lost
    return bool(ImageTransform(side).mask(mask, image).any())


def _leaks(images: ImageSet, digests: Mapping[Path, bytes]) -> Iterator[Problem]:
    """Test images whose file is in the training set too, under whatever name."""
    trained = {digests[sample.path]: sample.path for sample in images.train if sample.path in digests}
    for sample in images.test:
        twin = trained.get(digests.get(sample.path, b""))
        if twin is not None:
            yield Problem(sample.category, f"{sample.path}: the same file as the training image {twin}")


def _sizes(found: Mapping[str, Counts], official: Mapping[str, Counts]) -> Iterator[Problem]:
    """Products on which AUROC means nothing, or that are not as large as they should be."""
    for category, counts in found.items():
        if not counts.good:
            yield Problem(category, f"{category}: no normal test image")
        if not counts.anomalous:
            yield Problem(category, f"{category}: no anomalous test image")
        if counts != official.get(category, counts):
            sizes = [" / ".join(map(str, numbers)) for numbers in (counts, official[category])]
            yield Problem(
                category, f"{category}: {sizes[0]} images (train / good / anomalous), officially {sizes[1]}"
            )
