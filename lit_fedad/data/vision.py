"""Image sets with COCO annotation files, where images without annotations are normal; VISION is one of them.

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
from lit_fedad.core.files import atomic, expand_home, user_cache
from lit_fedad.data.image_files import LeftOut, find_images, folder_name
from lit_fedad.data.input_files import check_pixels, inside, read_json, require_files
from lit_fedad.data.layout_names import NORMAL, bare
from lit_fedad.data.sample import ImageSet, Sample
from lit_fedad.data.subset import choose_products, split_normals, subset

_MAX_RUN_BITS = 60  # of the length of one run
_MAX_NAMED = 20  # images that a message names


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
            UserError: Annotations are of another form; the message names each.
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
        ids = _count_unique(image["id"] for image in content["images"])
        _count_unique(image["file_name"] for image in content["images"])
        annotations: dict[int, list[dict[str, Any]]] = defaultdict(list)
        for annotation in content["annotations"]:
            if annotation["image_id"] not in ids:  # if it were left out, its image could count as normal
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
                _most_frequent(categories[a["category_id"]] for a in annotations[image["id"]]),
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


def _count_unique(values: Iterable[Any]) -> Counter[Any]:
    """Counts values; refuses one that occurs more than once."""
    counts = Counter(values)
    if repeated := [value for value, count in counts.items() if count > 1]:
        raise ValueError(f"image {repeated[0]!r} is listed twice")
    return counts


def _size(width: Any, height: Any) -> tuple[int, int]:
    """Checks width and height of an image, for a mask of this size is made before the image is opened."""
    if not all(type(side) is int and side > 0 for side in (width, height)):
        raise ValueError(f"width {width!r} and height {height!r} are no sides of an image")
    check_pixels(width, height)
    return width, height


def _most_frequent(categories: Iterable[str]) -> str:
    counted = Counter(categories).most_common(1)
    return counted[0][0] if counted else "good"


def _segmentation(segmentation: Any, shape: tuple[int, ...]) -> np.ndarray:
    """Draws a list of polygons, or run lengths, as a mask; an empty one if the segmentation is missing."""
    if isinstance(segmentation, dict):
        return _run_lengths(segmentation["counts"], shape)
    region = np.zeros(shape, dtype=bool)
    for corners in segmentation or []:
        x, y = np.asarray(corners, dtype=float).reshape(-1, 2).T
        # COCO puts the corner of the first pixel at the origin, scikit-image its centre.
        region[polygon(y - 0.5, x - 0.5, shape)] = True
    return region


def _run_lengths(counts: str | Sequence[int], shape: tuple[int, ...]) -> np.ndarray:
    """Draws a region from alternating lengths of background and region, column by column."""
    lengths = _decompress(counts) if isinstance(counts, str) else counts
    if min(lengths, default=0) < 0 or sum(lengths) != math.prod(shape):
        raise ValueError("its run lengths do not add up to the image")
    values = np.arange(len(lengths)) % 2 == 1
    return np.repeat(values, lengths).reshape(shape, order="F")


def _decompress(text: str) -> list[int]:
    """Decodes COCO's text form of run lengths: 5 bits a character, low bits first, each less the last but one."""
    lengths: list[int] = []
    value = shift = 0
    for character in text:
        bits = ord(character) - 48
        value |= (bits & 31) << shift
        shift += 5
        if shift > _MAX_RUN_BITS:
            raise ValueError("its run lengths are damaged")
        if bits & 32:  # more characters follow
            continue
        if bits & 16:
            value -= 1 << shift
        lengths.append(value + (lengths[-2] if len(lengths) > 2 else 0))
        value = shift = 0
    return lengths


def _box(box: Sequence[float], shape: tuple[int, ...]) -> np.ndarray:
    """Marks every pixel that a box (x, y, width, height) touches."""
    x, y, width, height = box
    region = np.zeros(shape, dtype=bool)
    # A negative index would count from the other end.
    left, top, right, bottom = (
        max(corner, 0) for corner in (floor(x), floor(y), ceil(x + width), ceil(y + height))
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
    root = expand_home(root)
    names = sorted(path.parents[1].name for path in root.glob(f"*/train/{_ANNOTATIONS}"))
    if not names:
        raise UserError(f"{root}: no folder <set>/train/{_ANNOTATIONS}; give the folder that holds the sets")
    train: list[Sample] = []
    test: list[Sample] = []
    drawings: dict[Path, AnnotatedImage] = {}
    for product in choose_products(products, names, root):
        train_folder, val_folder = root / product / "train", root / product / "val"
        defective, normal = _images(train_folder)
        if not normal:
            raise UserError(
                f"{train_folder}: each of its {len(defective)} images has a defect, none is left for training;"
                f" sort normal images, for example out of inference, into {train_folder / 'good'}"
            )
        train += [Sample(path, product) for path in normal]
        val_annotated, val_normal = _images(val_folder)
        if not val_normal:
            warnings.warn(
                f"{val_folder}: no normal test image; sort some into {val_folder / 'good'}", stacklevel=2
            )
        folder = _mask_folder(mask_folder, product, val_folder / _ANNOTATIONS)
        for image in val_annotated:
            relative = image.path.relative_to(val_folder)  # images in several folders may share a name
            mask = folder / relative.parent / f"{relative.name}.png"
            drawings[mask] = image
            test.append(Sample(image.path, product, image.defect, mask))
        test += [Sample(path, product) for path in val_normal]
    images = ImageSet(name, tuple(train), tuple(test))
    chosen = subset(images, train_per_product, test_per_product, seed)
    write_masks({sample.mask: drawings[sample.mask] for sample in chosen.test if sample.mask})
    return chosen


def _images(folder: Path) -> tuple[list[AnnotatedImage], list[Path]]:
    """Lists the annotated images of ``train`` or ``val``, and the normal ones, with those that lie in ``good``."""
    images, good, skipped = read_coco(folder / _ANNOTATIONS), folder / "good", LeftOut()
    normal = [image.path for image in images if not image.annotations]
    normal += find_images(good, skipped) if good.is_dir() else []
    skipped.warn(good)
    return [image for image in images if image.annotations], normal


def _mask_folder(given: str | Path | None, product: str, annotations: Path) -> Path:
    """Names the folder of a product's masks; its name changes with the annotations."""
    folder = expand_home(given) if given else user_cache() / "masks"
    key = hashlib.sha256(f"{_VERSION}".encode() + annotations.read_bytes()).hexdigest()[:12]
    return folder / f"{product}-{key}"


def write_masks(drawings: dict[Path, AnnotatedImage]) -> None:
    """Writes the masks that are not there yet; each appears complete or not at all.

    Raises:
        UserError: Masks cannot be written, or annotations cannot be drawn; the message names their images.
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
        named = ", ".join([path.name for path in others[:_MAX_NAMED]] + ["..."] * (len(others) > _MAX_NAMED))
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
    root = expand_home(root)
    product = name or folder_name(root)
    normal: dict[Path, Sample] = {}
    anomalous: dict[Path, Sample] = {}
    drawings: dict[Path, AnnotatedImage] = {}
    for file in [root / image for image in ([annotations] if isinstance(annotations, str) else annotations)]:
        listed = read_coco(file, root / images if images is not None else image_folder(file, root))
        masks = _mask_folder(mask_folder, product, file)
        for number, image in enumerate(listed):
            if image.path in normal or image.path in anomalous:
                raise UserError(f"{file}: lists {image.path} again; remove one of its entries")
            if image.annotations:
                mask = masks / f"{number}-{image.path.name}.png"
                drawings[mask] = image
                anomalous[image.path] = Sample(image.path, product, image.defect, mask)
            else:
                normal[image.path] = Sample(image.path, product)
    if not normal:
        raise UserError(
            f"{root}: each of {len(anomalous)} images is annotated, and none is normal; add normal images"
        )
    write_masks(drawings)
    image_set = ImageSet(product, tuple(normal.values()), tuple(anomalous.values()))
    return split_normals(image_set, train_share, seed)


def image_folder(file: Path, root: Path) -> Path:
    """Finds the folder of the images that an annotation file names, by the first image; by default the file's own."""
    try:
        first_name = str(read_json(file)["images"][0]["file_name"])
        name = file.stem.removeprefix("instances_")
        folders = [
            file.parent,
            file.parent / "images",
            root / "images",
            root,
            file.parent.parent,
            root / name,
        ]
        return next((folder for folder in folders if (folder / first_name).is_file()), file.parent)
    except (OSError, UserError, KeyError, TypeError, IndexError):
        return file.parent
