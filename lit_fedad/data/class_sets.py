"""Public sets of labelled natural images, as distributed: CIFAR, SVHN, STL-10, ImageNette, Tiny ImageNet, Places365."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torchvision.datasets import CIFAR10, CIFAR100, STL10, SVHN, ImageFolder, Places365

from lit_fedad.core.errors import UserError
from lit_fedad.core.files import expand_home, given_bytes
from lit_fedad.data.labelled import HALF, LabelledSet, balanced, draw, read_images, resized
from lit_fedad.data.transform import Fit

Part = tuple[Tensor | list[Path], Tensor]
"""Training or test part of a set: images, uint8 [N, 3, H, W], or their files, and labels, int64 [N]."""


class Source(NamedTuple):
    """How a set is read.

    Attributes:
        read: Reads names of classes, training and test part from a folder; files of images are only listed.
        size: Side that images are usually scaled to.
        mean: Mean of each channel in [0, 1] that is usually taken.
        std: Standard deviation of each channel, likewise.
    """

    read: Callable[[Path], tuple[Sequence[str], Part, Part]]
    size: int
    mean: Sequence[float] = HALF
    std: Sequence[float] = HALF


def class_set(
    root: str | Path,
    name: Literal["cifar10", "cifar100", "svhn", "stl10", "imagenette", "tiny_imagenet"],
    size: int | None = None,
    train_per_class: int | None = None,
    test_per_class: int | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    seed: int = 0,
    fit: Fit = "crop",
) -> LabelledSet:
    """Reads one of the sets in `SOURCES`.

    CIFAR-100 has its fine labels, STL-10 its labelled images. The test images of ImageNette and Tiny ImageNet are those
    for validation.

    Args:
        root: The folder in which the authors' archive was unpacked; for the last two also the unpacked folder itself.
        name: Which set.
        size: Side of the square images in pixels; None for that of the source. Arrays are scaled bilinearly and
            antialiased. Of image files only those that are drawn are read (`read_images`).
        train_per_class: As in `LabelledSet.subset`.
        test_per_class: As in `LabelledSet.subset`.
        mean: Mean of each channel in [0, 1], or of all; None for that of the source.
        std: Standard deviation, likewise.
        seed: As in `LabelledSet.subset`.
        fit: How files of images get their shape, as in `ImageTransform`; new images must get it in the same way.

    Raises:
        UserError: A file is missing or damaged, or a limit is below 1.
    """
    source = SOURCES[name]
    classes, train, test = source.read(expand_home(root))
    side = size or source.size
    return LabelledSet(
        name,
        tuple(classes),
        *_drawn(train, "train", train_per_class, seed, side, fit),
        *_drawn(test, "test", test_per_class, seed, side, fit),
        source.mean if mean is None else mean,
        source.std if std is None else std,
    )


def _drawn(
    part: Part, kind: Literal["train", "test"], limit: int | None, seed: int, side: int, fit: Fit
) -> tuple[Tensor, Tensor]:
    """Draws images of each class, and scales them."""
    images, labels = part
    positions = torch.arange(len(labels))[balanced(labels, kind, limit, seed)]
    if isinstance(images, Tensor):
        return resized(images[positions], side, side), labels[positions]
    return read_images([images[position] for position in positions], side, fit), labels[positions]


def _arrays(
    root: Path,
    source: Any,
    parts: Sequence[Mapping[str, Any]],
    classes: Sequence[str] | None = None,
    files: Sequence[str] | None = None,
    url: str | None = None,
) -> tuple[Sequence[str], Part, Part]:
    """Reads both parts of a set of arrays by torchvision."""
    read: list[Part] = []
    for file, choice in zip(files or [source.base_folder] * 2, parts, strict=True):
        try:
            part = source(root, **choice, download=False)
        except RuntimeError as error:
            raise UserError(
                f"{root / file}: is missing or damaged; unpack {url or source.url} in {root}"
            ) from error
        pixels = torch.from_numpy(part.data)
        labels = part.targets if hasattr(part, "targets") else part.labels
        channels_first = pixels.shape[1] == 3
        read.append(
            (pixels if channels_first else pixels.permute(0, 3, 1, 2), torch.as_tensor(labels).long())
        )
        names = classes or part.classes
    return names, *read  # type: ignore[return-value]


class LabelledSTL10(STL10):
    """STL-10 without its unlabelled files (2.6 GB), which are neither needed nor checked."""

    train_list = STL10.train_list[:2]


IMAGENETTE_ADDRESS = "https://s3.amazonaws.com/fast-ai-imageclas/imagenette2-160.tgz"

IMAGENETTE = {
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
"""WordNet number, which is the name of a folder -> class of ImageNette."""


def _imagenette(root: Path) -> tuple[Sequence[str], Part, Part]:
    folders = (
        [root] if (root / "train").is_dir() else [f for f in sorted(root.glob("imagenette2*")) if f.is_dir()]
    )
    if len(folders) != 1:
        listed = ", ".join(folder.name for folder in folders) or "no folder imagenette2*"
        raise UserError(f"{root}: holds {listed}; unpack {IMAGENETTE_ADDRESS}, and give its folder as root")
    train, test = (_class_folders(folders[0] / part) for part in ("train", "val"))
    return tuple(IMAGENETTE.values()), train, test


def _class_folders(folder: Path) -> Part:
    """Lists the files of ImageNette in order of classes."""
    try:
        images = ImageFolder(folder)
    except FileNotFoundError as error:  # no such folder, or a class without images
        raise UserError(f"{folder}: is missing or lacks images; unpack {IMAGENETTE_ADDRESS} anew") from error
    if images.classes != list(IMAGENETTE):
        odd = sorted(set(images.classes) ^ set(IMAGENETTE))
        raise UserError(f"{folder}: must hold the ten folders of ImageNette and no other, see {odd[0]}")
    return [Path(path) for path, _ in images.samples], torch.tensor(images.targets)


TINY_FOLDER = "tiny-imagenet-200"
TINY_ADDRESS = f"http://cs231n.stanford.edu/{TINY_FOLDER}.zip"


def _tiny_imagenet(root: Path) -> tuple[Sequence[str], Part, Part]:
    """Lists the files of Tiny ImageNet, with classes in the order of ``wnids.txt``."""
    folder = root / TINY_FOLDER if (root / TINY_FOLDER).is_dir() else root
    labels = {wnid: label for label, wnid in enumerate(_lines(folder / "wnids.txt"))}
    train: list[tuple[Path, int]] = []
    for wnid, label in labels.items():
        class_folder = folder / "train" / wnid / "images"
        images = sorted(class_folder.glob("*.JPEG"))
        if not images:
            raise UserError(f"{class_folder}: holds no image (*.JPEG); unpack {TINY_ADDRESS} anew")
        train += [(file, label) for file in images]
    annotations = folder / "val" / "val_annotations.txt"
    rows = [line.split("\t") for line in _lines(annotations)]  # name, class and the corners of a box
    for number, row in enumerate(rows, 1):
        if len(row) < 2 or row[1] not in labels or Path(row[0]).name != row[0]:
            raise UserError(
                f"{annotations}: line {number} names no image and class of wnids.txt; unpack {TINY_ADDRESS} anew"
            )
    test = [(folder / "val" / "images" / row[0], labels[row[1]]) for row in rows]
    parts = (
        ([file for file, _ in part], torch.tensor([label for _, label in part])) for part in (train, test)
    )
    return _class_names(folder / "words.txt", list(labels)), *parts  # type: ignore[return-value]


def _class_names(path: Path, wnids: Sequence[str]) -> tuple[str, ...]:
    """Returns the first synonym of each class, or its WordNet number where two classes share that synonym."""
    synonyms = dict(line.split("\t", 1) for line in _lines(path) if "\t" in line)
    first = [synonyms.get(wnid, wnid).split(",")[0] for wnid in wnids]
    count = Counter(first)
    return tuple(name if count[name] == 1 else wnid for name, wnid in zip(first, wnids, strict=True))


def _lines(path: Path) -> list[str]:
    try:
        lines = given_bytes(path).decode("utf-8", "replace").splitlines()
    except OSError as error:
        raise UserError(
            f"{path}: cannot be read; unpack {TINY_ADDRESS}, and give its folder as root"
        ) from error
    if not lines:
        raise UserError(f"{path}: is empty; unpack {TINY_ADDRESS} anew")
    return lines


STL10_CLASSES = ("airplane", "bird", "car", "cat", "deer", "dog", "horse", "monkey", "ship", "truck")

_cifar = partial(_arrays, parts=({"train": True}, {"train": False}))
_SPLITS = ({"split": "train"}, {"split": "test"})


def _svhn(root: Path) -> tuple[Sequence[str], Part, Part]:
    files, url = ["train_32x32.mat", "test_32x32.mat"], "http://ufldl.stanford.edu/housenumbers"
    return _arrays(root, SVHN, _SPLITS, tuple(map(str, range(10))), files, url)


SOURCES: Mapping[str, Source] = {
    "cifar10": Source(
        partial(_cifar, source=CIFAR10), 32, (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
    ),
    "cifar100": Source(
        partial(_cifar, source=CIFAR100), 32, (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)
    ),
    "svhn": Source(_svhn, 32),
    "stl10": Source(partial(_arrays, source=LabelledSTL10, parts=_SPLITS, classes=STL10_CLASSES), 32),
    "imagenette": Source(_imagenette, 64),
    "tiny_imagenet": Source(_tiny_imagenet, 64, (0.4802, 0.4481, 0.3975), (0.2770, 0.2691, 0.2821)),
}
"""Name -> how the set is read. Means and deviations are those of the training images, or the customary ones."""


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
    root = expand_home(root)
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
    """Reads images uint8 [N, 3, size, size] and labels int64 [N]."""
    paths, labels = [Path(part.imgs[i][0]) for i in chosen], [part.targets[i] for i in chosen]
    return read_images(paths, size), torch.tensor(labels, dtype=torch.int64)
