"""Labelled images packed into ``.npz`` files: as encoded images, as plain arrays, or with the keys of MedMNIST.

Encoded images lie one after another in ``jpeg`` (uint8 [bytes]): image i is ``jpeg[offsets[i]:offsets[i + 1]]``.
Plain arrays are ``images`` (uint8 [N, H, W] or [N, H, W, 3]). Both go with ``labels`` ([N] or [N, 1]) and, if the
classes have names, ``classes`` ([K]). MedMNIST has both parts in one file: ``train_images``, ``train_labels``,
``test_images`` and ``test_labels``.
"""

import tokenize
import warnings
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from numpy.lib.npyio import NpzFile
from PIL import Image
from torch import Tensor

from lit_fedad.core.errors import UserError, first_line
from lit_fedad.core.extras import install
from lit_fedad.core.files import check_regular, expand_home
from lit_fedad.data.input_files import check_array
from lit_fedad.data.labelled import HALF, LabelledSet
from lit_fedad.data.pictures import decode_upload, sniff, to_rgb
from lit_fedad.data.subset import limited_by

Channels = Literal[1, 3]

_MAX_CLASSES = 100_000  # a label may be any number, and each class gets a name and weights
_GREY = ("1", "L", "I")  # beginnings of Pillow's modes
# What damaged archives and arrays raise: MemoryError where an array claims a size that memory lacks.
_DAMAGE = (
    OSError, EOFError, ValueError, RuntimeError, MemoryError, tokenize.TokenError, zipfile.BadZipFile, zlib.error,
)  # fmt: skip


@limited_by(LabelledSet.subset)
def packed(
    root: str | Path,
    train: str | None,
    test: str | None = None,
    name: str | None = None,
    mean: Sequence[float] = HALF,
    std: Sequence[float] = HALF,
    channels: Channels = 3,
    classes: Sequence[str] | None = None,
) -> LabelledSet:
    """Reads one or two ``.npz`` files.

    Args:
        root: The folder that holds the files.
        train: File of the training images, relative to ``root``; None for a set that is only tested on, which
            needs no labels either.
        test: File of the test images; None if ``train`` holds both parts under MedMNIST's keys.
        name: Name of the set; by default that of the training (or only) file.
        mean: Mean of each channel in [0, 1], or of all.
        std: Standard deviation, likewise.
        channels: 3 gives grey images three equal channels, 1 leaves them one and refuses colours.
        classes: Class names, for files that hold none; None takes the labels' numbers, from 0 to the highest.

    Raises:
        UserError: A file or key is missing or damaged, the two parts do not fit together, images are coloured where
            one channel is asked for, classes without names are more than 100,000, or a limit is below 1.
    """
    root = expand_home(root)
    if train is None:
        if test is None:
            raise UserError(f"{root}: neither train nor test names a file; give at least one")
        testing = _read(root / test, "", channels, labelled=False)
        training = replace(testing, images=testing.images[:0], labels=testing.labels[:0])
    else:
        training = _read(root / train, "train_" if test is None else "", channels)
        testing = _read(root / (test or train), "test_" if test is None else "", channels)
    if training.images.shape[1:] != testing.images.shape[1:]:
        sizes = [f"{part.images.shape[3]}x{part.images.shape[2]}" for part in (training, testing)]
        raise UserError(
            f"{testing.path}: test images are {sizes[1]} pixels, training images {sizes[0]}; resize one of them"
        )
    return LabelledSet(
        name or Path(train or testing.path).stem,
        _class_names(training, testing, classes),
        *(training.images, training.labels),
        *(testing.images, testing.labels),
        *(mean, std),
    )


MEDMNIST_ADDRESS = "https://medmnist.com"

_ORGANS = (
    *("bladder", "left femur", "right femur", "heart", "left kidney", "right kidney"),
    *("liver", "left lung", "right lung", "pancreas", "spleen"),
)

MEDMNIST_CLASSES = {
    "pathmnist": (
        *("adipose", "background", "debris", "lymphocytes", "mucus", "smooth muscle"),
        *("normal mucosa", "stroma", "adenocarcinoma"),
    ),
    "octmnist": ("neovascularization", "macular edema", "drusen", "normal"),
    "organcmnist": _ORGANS,
    "organsmnist": _ORGANS,
    "pneumoniamnist": ("normal", "pneumonia"),
}
"""Name of a set -> its classes, in the order of its labels."""


@limited_by(LabelledSet.subset)
def medmnist(
    root: str | Path,
    name: Literal["pathmnist", "octmnist", "organcmnist", "organsmnist", "pneumoniamnist"],
    size: Literal[28, 64, 128, 224] = 28,
    mean: Sequence[float] = HALF,
    std: Sequence[float] = HALF,
    channels: Channels = 3,
    download: bool = False,
) -> LabelledSet:
    """Reads the training and test part of a set; the validation part is not used.

    Args:
        root: The folder that holds the official file: ``pathmnist.npz``, at other sizes than 28 ``pathmnist_64.npz``.
        name: Which set. ``pathmnist`` is coloured, the others are grey.
        size: Side of the images in pixels.
        mean: Mean of each channel in [0, 1], or of all.
        std: Standard deviation, likewise.
        channels: As in `packed`.
        download: Whether a missing file is fetched; this takes the package ``medmnist``.

    Raises:
        UserError: The file is missing, damaged or cannot be fetched, or as in `packed`.
    """
    root = expand_home(root)
    path = root / f"{name}{'' if size == 28 else f'_{size}'}.npz"
    if not path.is_file():
        if not download:
            raise UserError(
                f"{path}: no such file; get it from {MEDMNIST_ADDRESS}, or give data.download=true"
            )
        _fetch(path, name, size)
    classes = MEDMNIST_CLASSES[name]
    return packed(root, path.name, name=name, mean=mean, std=std, channels=channels, classes=classes)


def _fetch(path: Path, name: str, size: int) -> None:
    """Lets the data set's own package download the file and check it."""
    try:
        package = import_module("medmnist")
    except ImportError as error:
        raise UserError(
            f"{path}: fetching it takes a package, {install('medmnist')}; or get it from {MEDMNIST_ADDRESS}"
        ) from error
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        reader = getattr(package, package.INFO[name]["python_class"])
        reader(split="test", download=True, size=size, root=str(path.parent))
    except (RuntimeError, OSError) as error:
        raise UserError(f"{path}: cannot be fetched; get it from {MEDMNIST_ADDRESS}") from error


def packed_images(path: Path) -> Tensor:
    """Reads the images of a file without their labels; under MedMNIST's keys, the training images.

    Returns:
        uint8 [N, 3, H, W].

    Raises:
        UserError: The file or its images are missing or damaged.
    """
    with _open(path) as arrays:
        has_parts = "train_images" in arrays or "train_jpeg" in arrays
        return _images(path, "train_" if has_parts else "", 3, arrays, "pack images under one of them")


@dataclass(frozen=True)
class _Part:
    """Part of a set: images uint8 [N, C, H, W], labels int64 [N] and the class names, None if the file has none."""

    path: Path
    images: Tensor
    labels: Tensor
    classes: tuple[str, ...] | None


def _read(path: Path, prefix: str, channels: Channels, labelled: bool = True) -> _Part:
    with _open(path) as arrays:
        hint = "name the test file as test" if prefix else "leave test out if the file holds both parts"
        images = _images(
            path, prefix, channels, arrays, hint if labelled else "pack images under one of them"
        )
        if not labelled and "labels" not in arrays:
            return _Part(path, images, torch.zeros(len(images), dtype=torch.int64), (path.stem,))
        labels = _array(path, f"{prefix}labels", arrays)
        classes = _array(path, "classes", arrays) if "classes" in arrays else None
    if labels.shape not in {(len(images),), (len(images), 1)} or labels.dtype.kind not in "iu":
        raise UserError(
            f"{path}: key '{prefix}labels' is {_described(labels)}; give one whole number for each of"
            f" {len(images)} images"
        )
    if classes is not None and classes.ndim != 1:
        raise UserError(f"{path}: key 'classes' is {_described(classes)}; give a list of names")
    names = None if classes is None else tuple(map(str, classes))
    return _Part(path, images, torch.from_numpy(labels.reshape(-1).astype(np.int64)), names)


def _open(path: Path) -> NpzFile:
    try:
        check_regular(path)
        # Mapped, so that a single array, which is refused below, is not read.
        arrays = np.load(path, allow_pickle=False, mmap_mode="r")
    except FileNotFoundError:
        raise UserError(
            f"{path}: no such file; give its folder as root and its name relative to it"
        ) from None
    except _DAMAGE as error:
        raise UserError(f"{path}: is not a readable .npz file; get it anew") from error
    if not isinstance(arrays, NpzFile):
        raise UserError(f"{path}: holds a single array; pack images and labels into an .npz file")
    return arrays


def _images(path: Path, prefix: str, channels: Channels, arrays: NpzFile, hint: str) -> Tensor:
    """Reads the images in either form, uint8 [N, channels, H, W]."""
    if f"{prefix}jpeg" in arrays:
        return _decoded(path, prefix, channels, arrays)
    if f"{prefix}images" in arrays:
        return _plain(path, f"{prefix}images", channels, arrays)
    raise UserError(f"{path}: no key '{prefix}images' or '{prefix}jpeg', only {', '.join(arrays)}; {hint}")


def _array(path: Path, key: str, arrays: NpzFile) -> np.ndarray:
    if key not in arrays:
        raise UserError(f"{path}: no key '{key}', only {', '.join(arrays)}; add it, or get the file anew")
    try:
        with zipfile.ZipFile(path) as archive:
            member = archive.getinfo(f"{key}.npy")
            with archive.open(member) as file:
                check_array(file, member.file_size, member.compress_size)
        return np.asarray(arrays[key])
    except (*_DAMAGE, KeyError) as error:  # KeyError: a member that is no array has another name
        raise UserError(f"{path}: key '{key}' is damaged; get the file anew ({first_line(error)})") from error


def _plain(path: Path, key: str, channels: Channels, arrays: NpzFile) -> Tensor:
    """Reads images kept as an array: uint8 [N, channels, H, W]."""
    images = _array(path, key, arrays)
    grey = images.ndim == 3
    if images.dtype != np.uint8 or not (grey or images.shape[3:] == (3,)) or not images.size:
        raise UserError(f"{path}: key '{key}' is {_described(images)}; give uint8 [N, H, W] or [N, H, W, 3]")
    if grey:
        return torch.from_numpy(images)[:, None].expand(-1, channels, -1, -1)  # views of one channel
    if channels == 1:
        raise UserError(_colours(f"{path}: images of key '{key}' are"))
    return torch.from_numpy(images).permute(0, 3, 1, 2).contiguous()


def _decoded(path: Path, prefix: str, channels: Channels, arrays: NpzFile) -> Tensor:
    """Decodes images kept encoded: uint8 [N, channels, H, W].

    Threads do not help: at 32 pixels an image takes 0.1 ms, most of it under the interpreter's lock.
    """
    encoded = _array(path, f"{prefix}jpeg", arrays)
    offsets = _array(path, f"{prefix}offsets", arrays)
    if encoded.ndim != 1 or encoded.dtype != np.uint8:
        raise UserError(f"{path}: key '{prefix}jpeg' is {_described(encoded)}; give uint8 [bytes]")
    whole_numbers = offsets.ndim == 1 and offsets.dtype.kind in "iu" and len(offsets) > 1
    bounds = [0, *(offsets.tolist() if whole_numbers else []), len(encoded)]
    if not whole_numbers or bounds != sorted(bounds):
        raise UserError(
            f"{path}: key '{prefix}offsets' is no rising list of places in {len(encoded)} bytes;"
            " give where each image starts, and the end"
        )
    content = encoded.tobytes()
    images = []
    for number, (start, end) in enumerate(pairwise(offsets.tolist())):
        try:
            encoded_image = content[start:end]
            picture = decode_upload(encoded_image, sniff(encoded_image) or "", Image.MAX_IMAGE_PIXELS)
            rgb = to_rgb(picture, path)  # sixteen bits and transparency as in files of their own
            images.append(np.asarray(rgb if channels == 3 else rgb.convert("L")))
        except Exception as error:  # Pillow reports damage through exceptions of many kinds
            raise UserError(
                f"{path}: image {number} of key '{prefix}jpeg' cannot be decoded; get the file anew"
            ) from error
        if channels == 1 and not picture.image.mode.startswith(_GREY):
            raise UserError(_colours(f"{path}: image {number} of key '{prefix}jpeg' is"))
        if images[-1].shape != images[0].shape:
            raise UserError(
                f"{path}: image {number} of key '{prefix}jpeg' is {images[-1].shape[1]}x{images[-1].shape[0]},"
                f" the first {images[0].shape[1]}x{images[0].shape[0]}; resize all to one size"
            )
    stacked = torch.from_numpy(np.stack(images))
    return stacked[:, None] if channels == 1 else stacked.permute(0, 3, 1, 2).contiguous()


def _colours(images: str) -> str:
    return f"{images} coloured, and one channel is asked for; give image.channels=3"


def _class_names(train: _Part, test: _Part, given: Sequence[str] | None) -> tuple[str, ...]:
    """Returns the class names of both parts: those of the files, else the given ones, else the labels' numbers."""
    if train.classes and test.classes and train.classes != test.classes:
        raise UserError(
            f"{test.path}: key 'classes' differs from that of {train.path}; give parts of one set"
        )
    labels = torch.cat([train.labels, test.labels])
    lowest, highest = int(labels.min()), int(labels.max())
    named = train.classes or test.classes or given
    if not named and lowest > 0:
        warnings.warn(
            f"{train.path}: no image has label 0, with which classes without names begin; if yours begin with {lowest},"
            f" subtract {lowest}, or give 'classes'",
            stacklevel=2,
        )
    if not named and highest >= _MAX_CLASSES:
        raise UserError(
            f"{train.path}: labels without 'classes' go up to {highest}, and at most {_MAX_CLASSES} classes are"
            " taken; number them from 0"
        )
    names = tuple(named or map(str, range(highest + 1)))
    for part in (train, test):
        outside = part.labels[(part.labels < 0) | (part.labels >= len(names))]
        if len(outside):
            raise UserError(
                f"{part.path}: labels hold {int(outside[0])}, but the {len(names)} classes are 0 to"
                f" {len(names) - 1}; correct the labels or 'classes'"
            )
    return names


def _described(array: np.ndarray) -> str:
    return f"{array.dtype} {list(array.shape)}"
