"""VISION, as downloaded: one folder a set with ``train``, ``val`` and ``inference``, annotated in COCO's format.

Source: Bai et al., "VISION Datasets: A Benchmark for Vision-based InduStrial InspectiON", arXiv:2306.07890.
"""

import hashlib
import os
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path

from PIL import Image

from lit_fedad.data.coco import AnnotatedImage, read_coco
from lit_fedad.data.products import choose_products
from lit_fedad.data.sample import IMAGE_SUFFIXES, ImageSet, Sample
from lit_fedad.data.subset import subset
from lit_fedad.errors import UserError

_ANNOTATIONS = "_annotations.coco.json"
_VERSION = 1  # raise it when the same annotations begin to give other masks


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
            ``masks`` in ``$LIT_FEDAD_CACHE`` or ``~/.cache/lit_fedad``.
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
    known = sorted(path.parents[1].name for path in root.glob(f"*/train/{_ANNOTATIONS}"))
    if not known:
        raise UserError(f"{root}: no folder <set>/train/{_ANNOTATIONS}; give the folder that holds the sets")
    masks = Path(mask_folder).expanduser() if mask_folder else _cache_folder()
    train: list[Sample] = []
    test: list[Sample] = []
    drawings: dict[Path, AnnotatedImage] = {}
    for product in choose_products(products, known, root):
        train += [Sample(path, product) for path in _train_images(root / product / "train")]
        annotated, good = _test_images(root / product / "val")
        folder = masks / f"{product}-{_key(root / product / 'val')}"
        for image in annotated:
            mask = folder / f"{image.path.name}.png"
            drawings[mask] = image
            test.append(Sample(image.path, product, image.defect, mask))
        test += [Sample(path, product) for path in good]
    whole = ImageSet(name, tuple(train), tuple(test))
    chosen = subset(whole, train_per_product, test_per_product, seed)
    _write({sample.mask: drawings[sample.mask] for sample in chosen.test if sample.mask})
    return chosen


def _train_images(folder: Path) -> list[Path]:
    """The normal images of ``train``."""
    images = read_coco(folder / _ANNOTATIONS)
    normal = [image.path for image in images if not image.annotations] + _sorted_out(folder)
    if not normal:
        raise UserError(
            f"{folder}: each of its {len(images)} images has a defect, none is left for training;"
            f" sort normal images, for example out of inference, into {folder / 'good'}"
        )
    return normal


def _test_images(folder: Path) -> tuple[list[AnnotatedImage], list[Path]]:
    """The annotated and the normal images of ``val``."""
    images = read_coco(folder / _ANNOTATIONS)
    normal = [image.path for image in images if not image.annotations] + _sorted_out(folder)
    if not normal:
        warnings.warn(f"{folder}: no normal test image; sort some into {folder / 'good'}", stacklevel=3)
    return [image for image in images if image.annotations], normal


def _sorted_out(folder: Path) -> list[Path]:
    """The normal images that a person has put into ``good``."""
    paths = sorted((folder / "good").glob("[!.]*"))
    return [path for path in paths if path.suffix.lower() in IMAGE_SUFFIXES]


def _cache_folder() -> Path:
    return Path(os.environ.get("LIT_FEDAD_CACHE") or "~/.cache/lit_fedad").expanduser() / "masks"


def _key(folder: Path) -> str:
    """Other annotations, other masks."""
    return hashlib.sha256(f"{_VERSION}".encode() + (folder / _ANNOTATIONS).read_bytes()).hexdigest()[:12]


def _write(drawings: dict[Path, AnnotatedImage]) -> None:
    """Writes the masks that are not there yet; each appears complete or not at all."""
    for path, image in drawings.items():
        if path.is_file():
            continue
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=path.parent, prefix=".") as workshop:
                fresh = Path(workshop) / path.name
                Image.fromarray(image.mask()).save(fresh)
                fresh.replace(path)
        except OSError as error:
            raise UserError(f"{path}: cannot be written ({error}); choose another mask_folder") from error
