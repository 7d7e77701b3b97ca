"""Places365 at 256 x 256 pixels, as its authors distribute it (Zhou et al., 2018); only what is drawn is read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torchvision.datasets import ImageFolder, Places365

from lit_fedad.core.errors import UserError
from lit_fedad.data.arrays import draw, read_images
from lit_fedad.data.labelled import HALF, LabelledSet, read_balanced

IMAGENETTE_ADDRESS = "https://s3.amazonaws.com/fast-ai-imageclas/imagenette2-160.tgz"

CLASSES = {
    "n01440764": "tench",
    "n02102040": "English springer",
    "n02979186": "cassette player",
    "n03000684": "chain saw",
    "n03028079": "church",
    "n03394916": "French horn",
    "n03417042": "garbage truck",
    "n03425413": "gas pump",
    "n03445777": "golf ball",
    "n03888257": "parachute",
}
"""WordNet number, which is the name of a folder -> class."""


def imagenette(
    root: str | Path,
    size: int = 64,
    train_per_class: int | None = None,
    test_per_class: int | None = None,
    mean: Sequence[float] = HALF,
    std: Sequence[float] = HALF,
    seed: int = 0,
) -> LabelledSet:
    """Reads ImageNette: 9,469 training and 3,925 test images in 10 classes; its validation images are the test images.

    Args:
        root: A folder ``imagenette2*`` as downloaded (any of the three sizes), or the one that holds it.
        size: Side of the square images in pixels; see `read_images`. FedVCK takes 64.
        train_per_class: As in `LabelledSet.subset`; only images that are drawn are read.
        test_per_class: Likewise.
        mean: Mean of each channel in [0, 1], or of all.
        std: Standard deviation, likewise.
        seed: As in `LabelledSet.subset`.

    Raises:
        UserError: A folder or image is missing or damaged, or a limit is below 1.
    """
    root = Path(root).expanduser()
    folders = (
        [root] if (root / "train").is_dir() else [f for f in sorted(root.glob("imagenette2*")) if f.is_dir()]
    )
    if len(folders) != 1:
        found = ", ".join(folder.name for folder in folders) or "no folder imagenette2*"
        raise UserError(f"{root}: holds {found}; unpack {IMAGENETTE_ADDRESS}, and give its folder as root")
    train, test = _files(folders[0] / "train"), _files(folders[0] / "val")
    return LabelledSet(
        "imagenette",
        tuple(CLASSES.values()),
        *read_balanced(*train, "train", train_per_class, seed, size),
        *read_balanced(*test, "test", test_per_class, seed, size),
        *(mean, std),
    )


def _files(folder: Path) -> tuple[list[Path], Tensor]:
    """The image files, class by class, and their labels, int64 [N]."""
    try:
        images = ImageFolder(folder)
    except FileNotFoundError as error:  # no such folder, or a class without images
        raise UserError(f"{folder}: is missing or lacks images; unpack {IMAGENETTE_ADDRESS} anew") from error
    if images.classes != list(CLASSES):
        odd = sorted(set(images.classes) ^ set(CLASSES))
        raise UserError(f"{folder}: must hold the ten folders of ImageNette and no other, see {odd[0]}")
    return [Path(path) for path, _ in images.samples], torch.tensor(images.targets)


TINY_FOLDER = "tiny-imagenet-200"
TINY_ADDRESS = f"http://cs231n.stanford.edu/{TINY_FOLDER}.zip"
TINY_SIDE = 64

TINY_IMAGENET_MEAN = (0.4802, 0.4481, 0.3975)
TINY_IMAGENET_STD = (0.2770, 0.2691, 0.2821)


def tiny_imagenet(
    root: str | Path,
    train_per_class: int | None = None,
    test_per_class: int | None = None,
    mean: Sequence[float] = TINY_IMAGENET_MEAN,
    std: Sequence[float] = TINY_IMAGENET_STD,
    seed: int = 0,
) -> LabelledSet:
    """Reads Tiny ImageNet: 100,000 training images of 64 x 64 pixels in 200 classes, and 10,000 for testing.

    These are its validation images: the labels of its own test images are not published. Classes come in the
    order of ``wnids.txt``.

    Args:
        root: The folder ``tiny-imagenet-200``, or the one that holds it.
        train_per_class: As in `LabelledSet.subset`; only images that are drawn are read.
        test_per_class: Likewise.
        mean: Mean of the three channels; by default what is commonly taken for this set.
        std: Standard deviation of the three channels; likewise.
        seed: As in `LabelledSet.subset`.

    Raises:
        UserError: A file is missing or damaged, or a limit is below 1.
    """
    root = Path(root).expanduser()
    folder = root / TINY_FOLDER if (root / TINY_FOLDER).is_dir() else root
    labels = {wnid: label for label, wnid in enumerate(_lines(folder / "wnids.txt"))}
    train, test = _training(folder / "train", labels), _validation(folder / "val", labels)
    return LabelledSet(
        "tiny_imagenet",
        _class_names(folder / "words.txt", list(labels)),
        *read_balanced(*train, "train", train_per_class, seed, TINY_SIDE),
        *read_balanced(*test, "test", test_per_class, seed, TINY_SIDE),
        *(mean, std),
    )


def _training(folder: Path, labels: Mapping[str, int]) -> tuple[list[Path], Tensor]:
    """The image files, class by class, and their labels, int64 [N]."""
    files = [sorted((folder / wnid / "images").glob("*.JPEG")) for wnid in labels]
    for wnid, own in zip(labels, files, strict=True):
        if not own:
            raise UserError(
                f"{folder / wnid / 'images'}: holds no image (*.JPEG); unpack {TINY_ADDRESS} anew"
            )
    labels_of = [label for label, own in enumerate(files) for _ in own]
    return [file for own in files for file in own], torch.tensor(labels_of)


def _validation(folder: Path, labels: Mapping[str, int]) -> tuple[list[Path], Tensor]:
    """The image files in the order of their annotations, and their labels, int64 [N]."""
    annotations = folder / "val_annotations.txt"
    # Name, class and the corners of a box.
    rows = [line.split("\t") for line in _lines(annotations)]
    for number, row in enumerate(rows, 1):
        if len(row) < 2 or row[1] not in labels:
            raise UserError(
                f"{annotations}: line {number} names no image and class of wnids.txt; unpack {TINY_ADDRESS} anew"
            )
    return [folder / "images" / row[0] for row in rows], torch.tensor([labels[row[1]] for row in rows])


def _class_names(path: Path, wnids: Sequence[str]) -> tuple[str, ...]:
    """The first of the synonyms of each class; its WordNet number where another class has the same."""
    synonyms = dict(line.split("\t", 1) for line in _lines(path) if "\t" in line)
    first = [synonyms.get(wnid, wnid).split(",")[0] for wnid in wnids]
    count = Counter(first)
    return tuple(name if count[name] == 1 else wnid for name, wnid in zip(first, wnids, strict=True))


def _lines(path: Path) -> list[str]:
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        raise UserError(
            f"{path}: cannot be read; unpack {TINY_ADDRESS}, and give its folder as root"
        ) from error
    if not lines:
        raise UserError(f"{path}: is empty; unpack {TINY_ADDRESS} anew")
    return lines


def places365(
    root: str | Path,
    size: int = 32,
    train_images: int | None = 1000,
    test_images: int | None = 10_000,
    mean: Sequence[float] = HALF,
    std: Sequence[float] = HALF,
    seed: int = 0,
) -> LabelledSet:
    """Reads random images of Places365-Standard: its validation part (36,500 images) is the test part here.

    Args:
        root: The folder that holds ``categories_places365.txt``, ``places365_val.txt`` and ``val_256``, and, for
            training images, ``places365_train_standard.txt`` and ``data_256_standard``. Where the last is
            missing there are no training images.
        size: Side of the square images in pixels; see `read_images`.
        train_images: At most this many of 1.8 million; None takes all.
        test_images: At most this many; None takes all.
        mean: Mean of the three channels.
        std: Standard deviation of the three channels.
        seed: Seed of the two draws.

    Raises:
        UserError: A file is missing or damaged, an image cannot be read, or a limit is below 0.
    """
    root = Path(root).expanduser()
    validation = _open(root, "val")
    test = _read(validation, draw(len(validation), test_images, "test_images", seed), size)
    if (root / "data_256_standard").is_dir():
        standard = _open(root, "train-standard")
        train = _read(standard, draw(len(standard), train_images, "train_images", seed), size)
    else:
        train = _read(validation, np.arange(0), size)
    classes = tuple(sorted(validation.class_to_idx, key=validation.class_to_idx.__getitem__))
    return LabelledSet("places365", classes, *train, *test, mean, std)


def _open(root: Path, split: str) -> Places365:
    try:
        return Places365(root, split=split, small=True, download=False)
    except RuntimeError as error:
        lists = [Places365._CATEGORIES_META[0], Places365._FILE_LIST_META[split][0]]
        archives = [Places365._DEVKIT_META["standard"][0], Places365._IMAGES_META[split, True][0]]
        raise UserError(
            f"{root}: {' or '.join(lists)} is missing or damaged; unpack {' and '.join(archives)} of"
            f" {Places365._BASE_URL} there"
        ) from error


def _read(part: Places365, chosen: np.ndarray, size: int) -> tuple[Tensor, Tensor]:
    """Images uint8 [N, 3, size, size] and labels int64 [N]."""
    paths, labels = [Path(part.imgs[i][0]) for i in chosen], [part.targets[i] for i in chosen]
    return read_images(paths, size), torch.tensor(labels, dtype=torch.int64)
