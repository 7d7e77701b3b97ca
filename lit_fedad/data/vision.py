"""Images annotated in COCO files, those without annotations normal; and VISION, whose sets are annotated so.

Source of VISION: Bai et al., "VISION Datasets: A Benchmark for Vision-based InduStrial InspectiON", arXiv:2306.07890.
"""

import hashlib
import math
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import ceil, floor
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from skimage.draw import polygon

from lit_fedad.core.errors import UserError
from lit_fedad.core.files import atomic, user_cache
from lit_fedad.data.image_files import LeftOut, find_images
from lit_fedad.data.input_files import check_pixels, inside, read_json, require_files
from lit_fedad.data.layout_names import NORMAL, bare
from lit_fedad.data.sample import ImageSet, Sample
from lit_fedad.data.subset import choose_products, split_normals, subset

_LONGEST_RUN = 60  # bits of a length
_NAMED = 20  # images of a message


@dataclass(frozen=True)
class AnnotatedImage:
    """One image of an annotation file.

    Attributes:
        path: The image file.
        width: Width in pixels.
        height: Height in pixels.
        defect: The category of most of its annotations; ``"good"`` if it has none.
        annotations: Its annotations as they are in the file.
    """

    path: Path
    width: int
    height: int
    defect: str
    annotations: tuple[dict[str, Any], ...]

    def mask(self) -> np.ndarray:
        """Draws all annotations into one mask.

        A pixel belongs to a polygon if its centre lies inside. A box stands in for an annotation whose segmentation
        is missing or covers no pixel.

        Returns:
            255 where any annotation is, otherwise 0, uint8 [height, width].

        Raises:
            UserError: Annotations are of another form; it names each.
        """
        mask = np.zeros((self.height, self.width), dtype=bool)
        problems: dict[str, Exception] = {}
        for number, annotation in enumerate(self.annotations):
            try:
                region = _segmentation(annotation.get("segmentation"), mask.shape)
                mask |= region if region.any() else _box(annotation["bbox"], mask.shape)
            except (ValueError, KeyError, TypeError, OverflowError) as error:
                problems[str(annotation.get("id", number))] = error
        if problems:
            first = next(iter(problems.values()))
            raise UserError(
                f"{self.path}: annotation {', '.join(problems)} cannot be drawn ({first!r}); correct or"
                " remove it"
            ) from first
        return mask.astype(np.uint8) * 255


def read_coco(file: Path, folder: Path | None = None) -> list[AnnotatedImage]:
    """Reads an annotation file.

    Args:
        file: The JSON file.
        folder: Folder of its images; None for its own.

    Returns:
        Its images, by name.

    Raises:
        UserError: The file is missing or of another form, or it names an image that is missing.
    """
    content = read_json(file)
    try:
        categories = {category["id"]: category["name"] for category in content["categories"]}
        ids = _once(image["id"] for image in content["images"])
        _once(image["file_name"] for image in content["images"])
        annotations: dict[int, list[dict[str, Any]]] = defaultdict(list)
        for annotation in content["annotations"]:
            if annotation["image_id"] not in ids:  # left out, its image could count as normal
                raise ValueError(f"an annotation is of image {annotation['image_id']!r}, which is not listed")
            if annotation["category_id"] not in categories:
                raise ValueError(
                    f"an annotation is of category {annotation['category_id']!r}, which is not listed"
                )
            kind = categories[annotation["category_id"]]
            if bare(kind) in NORMAL:
                raise ValueError(f"annotations of '{kind}' mark what is normal; remove them")
            annotations[annotation["image_id"]].append(annotation)
        images = [
            AnnotatedImage(
                inside(folder or file.parent, image["file_name"], file),
                *_size(image["width"], image["height"]),
                _defect(categories[a["category_id"]] for a in annotations[image["id"]]),
                tuple(annotations[image["id"]]),
            )
            for image in content["images"]
        ]
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        problem = f"no key {error}" if isinstance(error, KeyError) else str(error)
        raise UserError(
            f"{file}: is no COCO annotation file ({problem}); correct it, or download it again"
        ) from error
    require_files([image.path for image in images], file, "unpack the archive again")
    return sorted(images, key=lambda image: image.path)


def _once(values: Iterable[Any]) -> Counter[Any]:
    """Counts values that may occur once each."""
    counts = Counter(values)
    if twice := [value for value, count in counts.items() if count > 1]:
        raise ValueError(f"image {twice[0]!r} is listed twice")
    return counts


def _size(width: Any, height: Any) -> tuple[int, int]:
    """The sides of an image, of which a mask is made before the image is opened."""
    if not all(type(side) is int and side > 0 for side in (width, height)):
        raise ValueError(f"width {width!r} and height {height!r} are no sides of an image")
    check_pixels(width, height)
    return width, height


def _defect(categories: Iterable[str]) -> str:
    most = Counter(categories).most_common(1)
    return most[0][0] if most else "good"


def _segmentation(segmentation: Any, shape: tuple[int, ...]) -> np.ndarray:
    """A list of polygons or run lengths as a mask; empty if it is missing."""
    if isinstance(segmentation, dict):
        return _run_lengths(segmentation["counts"], shape)
    region = np.zeros(shape, dtype=bool)
    for corners in segmentation or []:
        x, y = np.asarray(corners, dtype=float).reshape(-1, 2).T
        # COCO puts the corner of the first pixel at the origin, scikit-image its centre.
        region[polygon(y - 0.5, x - 0.5, shape)] = True
    return region


def _run_lengths(counts: str | Sequence[int], shape: tuple[int, ...]) -> np.ndarray:
    """Alternating lengths of background and region, column by column."""
    lengths = _decompress(counts) if isinstance(counts, str) else counts
    if min(lengths, default=0) < 0 or sum(lengths) != math.prod(shape):
        raise ValueError("its run lengths do not add up to the image")
    values = np.arange(len(lengths)) % 2 == 1
    return np.repeat(values, lengths).reshape(shape, order="F")


def _decompress(text: str) -> list[int]:
    """COCO's text form of run lengths: 5 bits a character, low bits first, as differences to the last but one."""
    lengths: list[int] = []
    value = shift = 0
    for character in text:
        bits = ord(character) - 48
        value |= (bits & 31) << shift
        shift += 5
        if shift > _LONGEST_RUN:
            raise ValueError("its run lengths are damaged")
        if bits & 32:  # more characters follow
            continue
        if bits & 16:
            value -= 1 << shift
        lengths.append(value + (lengths[-2] if len(lengths) > 2 else 0))
        value = shift = 0
    return lengths


def _box(box: Sequence[float], shape: tuple[int, ...]) -> np.ndarray:
    """Every pixel that a box (x, y, width, height) touches."""
    x, y, width, height = box
    region = np.zeros(shape, dtype=bool)
    # A place below 0 would count from the other end.
    left, top, right, bottom = (
        max(place, 0) for place in (floor(x), floor(y), ceil(x + width), ceil(y + height))
    )
    region[top:bottom, left:right] = True
    return region


_ANNOTATIONS = "_annotations.coco.json"
_VERSION = 2  # raise it when the same annotations begin to give other masks


def vision(
    root: str | Path,
    products: Sequence[str] | None = None,
    mask_folder: str | Path | None = None,
    name: str = "vision",
    train_per_product: int | None = None,
    test_per_product: int | None = None,
    seed: int = 0,
) -> ImageSet:
    """Reads sets of VISION for anomaly detection.

    VISION is made for supervised detection. Of ``train`` the normal images are taken, of ``val`` all. An image is
    normal if the annotation file lists it without annotations, or if it lies in a folder ``good`` beside that file.
    ``inference`` has no labels and is not read.

    As published, the sets seem to have no normal images with labels: every image of ``train`` and ``val`` is
    reported to show a defect, in all sets but PCB_2, of which no report was found. FedDyMem's paper does not say what
    it trained on. Sort normal images by hand, for example out of ``inference``, into ``train/good`` and ``val/good``.

    Args:
        root: The folder that holds the sets.
        products: Sets such as ``PCB_1``; None takes all.
        mask_folder: Where the masks are written, once, drawn from polygons, run lengths or else boxes; by default
            ``masks`` in `user_cache`.
        name: Name of the image set.
        train_per_product: As in `subset`.
        test_per_product: As in `subset`.
        seed: As in `subset`.

    Returns:
        The image set, with masks; the normal test images of a set come last. An image with several defects is
        called after the most frequent.

    Raises:
        UserError: A file is missing or of another form, a set has no normal training image, or the masks cannot be
            written.
    """
    root = Path(root).expanduser()
    names = sorted(path.parents[1].name for path in root.glob(f"*/train/{_ANNOTATIONS}"))
    if not names:
        raise UserError(f"{root}: no folder <set>/train/{_ANNOTATIONS}; give the folder that holds the sets")
    train: list[Sample] = []
    test: list[Sample] = []
    drawings: dict[Path, AnnotatedImage] = {}
    for product in choose_products(products, names, root):
        learnt, tested = root / product / "train", root / product / "val"
        shown, normal = _images(learnt)
        if not normal:
            raise UserError(
                f"{learnt}: each of its {len(shown)} images has a defect, none is left for training;"
                f" sort normal images, for example out of inference, into {learnt / 'good'}"
            )
        train += [Sample(path, product) for path in normal]
        annotated, good = _images(tested)
        if not good:
            warnings.warn(f"{tested}: no normal test image; sort some into {tested / 'good'}", stacklevel=2)
        folder = _mask_folder(mask_folder, product, tested / _ANNOTATIONS)
        for image in annotated:
            relative = image.path.relative_to(tested)  # of one name there may be images in several folders
            mask = folder / relative.parent / f"{relative.name}.png"
            drawings[mask] = image
            test.append(Sample(image.path, product, image.defect, mask))
        test += [Sample(path, product) for path in good]
    images = ImageSet(name, tuple(train), tuple(test))
    chosen = subset(images, train_per_product, test_per_product, seed)
    write_masks({sample.mask: drawings[sample.mask] for sample in chosen.test if sample.mask})
    return chosen


def _images(folder: Path) -> tuple[list[AnnotatedImage], list[Path]]:
    """The annotated images of ``train`` or ``val``, and the normal ones, with those that a person put into ``good``."""
    images, good, skipped = read_coco(folder / _ANNOTATIONS), folder / "good", LeftOut()
    normal = [image.path for image in images if not image.annotations]
    normal += find_images(good, skipped) if good.is_dir() else []
    skipped.warn(good)
    return [image for image in images if image.annotations], normal


def _mask_folder(given: str | Path | None, product: str, annotations: Path) -> Path:
    """The folder of the masks of a product: other annotations, other masks."""
    folder = Path(given).expanduser() if given else user_cache() / "masks"
    key = hashlib.sha256(f"{_VERSION}".encode() + annotations.read_bytes()).hexdigest()[:12]
    return folder / f"{product}-{key}"


def write_masks(drawings: dict[Path, AnnotatedImage]) -> None:
    """Writes the masks that are not there yet; each appears complete or not at all.

    Raises:
        UserError: Masks cannot be written, or annotations not be drawn; it names their images.
    """
    problems: dict[Path, UserError] = {}
    for path, image in drawings.items():
        if path.is_file():
            continue
        try:
            drawn = image.mask()
            with atomic(path) as partial:
                Image.fromarray(drawn).save(partial, format="PNG")
        except UserError as error:
            problems[image.path] = error
        except OSError as error:
            raise UserError(f"{path}: cannot be written ({error}); choose another mask_folder") from error
    if problems:
        first, *others = problems
        named = ", ".join([path.name for path in others[:_NAMED]] + ["..."] * (len(others) > _NAMED))
        more = f"; further images with such annotations ({len(others)}): {named}" if others else ""
        raise UserError(f"{problems[first]}{more}") from problems[first]


def coco(
    root: str | Path,
    annotations: str | Sequence[str],
    images: str | None = None,
    train_share: float = 0.8,
    mask_folder: str | Path | None = None,
    seed: int = 0,
    name: str | None = None,
) -> ImageSet:
    """Reads COCO annotation files for anomaly detection.

    Images without annotations are normal; a random share of them is for training. The others are anomalous, called
    after their most frequent category, with a mask of all their annotations (`AnnotatedImage.mask`).

    Args:
        root: The folder that the others are relative to.
        annotations: The JSON file, or several.
        images: Folder of the images; None to look beside the file, and in folders ``images`` near it.
        train_share: Share of the normal images that is for training, between 0 and 1.
        mask_folder: As for `vision`.
        seed: Seed of the split.
        name: Name of the set and of its one product; by default the name of ``root``.

    Raises:
        UserError: The file is missing or of another form, names a missing image, or has no normal image.
    """
    root = Path(root).expanduser()
    product = name or root.absolute().name
    normal: dict[Path, Sample] = {}
    anomalous: dict[Path, Sample] = {}
    drawings: dict[Path, AnnotatedImage] = {}
    for file in [root / one for one in ([annotations] if isinstance(annotations, str) else annotations)]:
        listed = read_coco(file, root / images if images is not None else image_folder(file, root))
        masks = _mask_folder(mask_folder, product, file)
        for number, one in enumerate(listed):
            if one.path in normal or one.path in anomalous:
                raise UserError(f"{file}: lists {one.path} again; remove one of its entries")
            if one.annotations:
                mask = masks / f"{number}-{one.path.name}.png"
                drawings[mask] = one
                anomalous[one.path] = Sample(one.path, product, one.defect, mask)
            else:
                normal[one.path] = Sample(one.path, product)
    if not normal:
        raise UserError(
            f"{root}: each of {len(anomalous)} images is annotated, and none is normal; add normal images"
        )
    write_masks(drawings)
    image_set = ImageSet(product, tuple(normal.values()), tuple(anomalous.values()))
    return split_normals(image_set, train_share, seed)


def image_folder(file: Path, root: Path) -> Path:
    """Finds the folder of the images that an annotation file names, by the first; its own where there is none."""
    try:
        first = str(read_json(file)["images"][0]["file_name"])
        part = file.stem.removeprefix("instances_")
        places = [file.parent, file.parent / "images", root / "images", root, file.parent.parent, root / part]
        return next((place for place in places if (place / first).is_file()), file.parent)
    except (OSError, UserError, KeyError, TypeError, IndexError):
        return file.parent
