"""Checks of an image set: every file that training would read, and the split."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

from lit_fedad.core.errors import UserError
from lit_fedad.core.files import sha256
from lit_fedad.core.threads import file_threads
from lit_fedad.data.cards import Counts
from lit_fedad.data.image_files import images_in
from lit_fedad.data.masks import MaskFacts, marked_pixels, mask_lines, measure, read_marks
from lit_fedad.data.pictures import open_picture
from lit_fedad.data.regions import saturation_areas
from lit_fedad.data.sample import ImageSet, Sample
from lit_fedad.data.transform import ImageTransform


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
    page: int | None = None,
) -> list[Problem]:
    """Reads every file of a set and reports its faults.

    Faults are images and masks that cannot be decoded, masks that do not fit their image or its label, test images
    that are training images as well (byte for byte) or of both labels, categories whose test images all have one
    label, and sizes other than the official ones.

    Args:
        images: The set.
        official: Category -> official size, for the categories where it is known.
        progress: Called with the number of images read and of all images.
        page: Page or frame of each file, as `ImageTransform.page`.

    Returns:
        The problems: of files in the order of the set, of all masks of a category, of repeated test images, of whole
        categories.
    """
    reader = ImageTransform(size=1, page=page)  # decodes as training does; what it returns is dropped
    samples = [*images.train, *images.test]
    problems: list[Problem] = []
    digests: dict[Path, bytes] = {}
    masks: dict[str, dict[Path, MaskFacts]] = {}
    with file_threads() as pool:
        readings = zip(samples, pool.map(partial(_read, reader), samples), strict=True)
        for done, (sample, reading) in enumerate(readings, 1):
            problems += [Problem(sample.category, message) for message in reading.messages]
            if reading.digest is not None:
                digests[sample.path] = reading.digest
            if reading.marks is not None and sample.mask is not None:
                masks.setdefault(sample.category, {})[sample.mask] = reading.marks
            progress(done, len(samples))
    mask_problems = [problem for product, marks in masks.items() for problem in _of_all_masks(product, marks)]
    return [*problems, *mask_problems, *_leaks(images, digests), *_sizes(count(images), official or {})]


class _Reading(NamedTuple):
    """What reading the files of a sample showed.

    Attributes:
        digest: Hash of the image file; None if it cannot be decoded.
        messages: What is wrong with image and mask.
        marks: Facts of the mask, if it marks something.
    """

    digest: bytes | None
    messages: list[str]
    marks: MaskFacts | None


def _read(reader: ImageTransform, sample: Sample) -> _Reading:
    digest, messages, marks = None, [], None
    try:
        reader.raw(sample.path)
        digest = bytes.fromhex(sha256(sample.path))
    except UserError as error:
        messages.append(str(error))
    if sample.mask is not None:
        try:
            if messages:  # without its image, a mask can still be checked for everything but its size
                files = images_in(sample.mask) if sample.mask.is_dir() else [sample.mask]
                masks = [marked_pixels(open_picture(file, reader.page, alone=True), file) for file in files]
                marked = any(mask.any() for mask in masks)
            else:
                pixels = read_marks(sample.mask, sample.path, reader.page)
                marked = bool(pixels.pixels.any())
                marks = measure(pixels, 1, pixels.pixels.size) if marked else None
                saturation_areas(sample, reader)
            if sample.label and not marked:
                messages.append(f"{sample.mask}: marks no pixel of the anomalous image {sample.path}")
            if marked and not sample.label:
                messages.append(f"{sample.mask}: marks pixels of {sample.path}, which counts as good")
        except UserError as error:
            messages.append(str(error))
    return _Reading(digest, messages, marks)


def _of_all_masks(product: str, marks: Mapping[Path, MaskFacts]) -> Iterator[Problem]:
    """Yields faults that only all masks of a product together show."""
    try:
        yield from (Problem(product, f"{product}: {line}") for line in mask_lines(marks, (1, 1)))
    except UserError as error:
        yield Problem(product, str(error))


def _leaks(images: ImageSet, digests: Mapping[Path, bytes]) -> Iterator[Problem]:
    """Yields test images that are also training images, byte for byte, or that occur with both labels."""
    train_paths = {digests[sample.path]: sample.path for sample in images.train if sample.path in digests}
    for sample in images.test:
        twin = train_paths.get(digests.get(sample.path, b""))
        if twin is not None:
            yield Problem(sample.category, f"{sample.path}: the same file as the training image {twin}")
    first_samples: dict[bytes, Sample] = {}
    for sample in images.test:
        first = first_samples.setdefault(digests.get(sample.path, bytes(sample.path)), sample)
        if first.label != sample.label:
            yield Problem(
                sample.category,
                f"{sample.path}: the same file as {first.path}, and one of them counts as good",
            )


def _sizes(counted: Mapping[str, Counts], official: Mapping[str, Counts]) -> Iterator[Problem]:
    """Yields categories without normal or anomalous test images, or whose sizes are not the official ones."""
    for category, counts in counted.items():
        if not counts.good:
            yield Problem(category, f"{category}: no normal test image")
        if not counts.anomalous:
            yield Problem(category, f"{category}: no anomalous test image")
        if counts != official.get(category, counts):
            sizes = [" / ".join(map(str, numbers)) for numbers in (counts, official[category])]
            yield Problem(
                category, f"{category}: {sizes[0]} images (train / good / anomalous), officially {sizes[1]}"
            )
