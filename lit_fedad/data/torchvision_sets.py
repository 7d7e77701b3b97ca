"""STL-10's labelled images as their authors distribute them (Coates, Ng and Lee, AISTATS 2011)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor
from torchvision.datasets import CIFAR10, CIFAR100, STL10, SVHN

from lit_fedad.core.errors import UserError
from lit_fedad.data.arrays import resized
from lit_fedad.data.labelled import HALF, LabelledSet

_SOURCE: dict[int, type[CIFAR10]] = {10: CIFAR10, 100: CIFAR100}

MEAN = {10: (0.4914, 0.4822, 0.4465), 100: (0.5071, 0.4865, 0.4409)}
"""Number of classes -> mean of each channel of the training images, in [0, 1]."""
STD = {10: (0.2470, 0.2435, 0.2616), 100: (0.2673, 0.2564, 0.2762)}
"""Number of classes -> standard deviation of each channel of the training images."""


def cifar(
    root: str | Path,
    classes: Literal[10, 100] = 10,
    train_per_class: int | None = None,
    test_per_class: int | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    seed: int = 0,
) -> LabelledSet:
    """Reads CIFAR-10 or CIFAR-100: 50,000 training and 10,000 test images of 32 x 32 pixels.

    Args:
        root: The folder that holds ``cifar-10-batches-py`` or ``cifar-100-python``.
        classes: 10, or 100 for CIFAR-100 with its fine labels.
        train_per_class: As in `LabelledSet.subset`.
        test_per_class: As in `LabelledSet.subset`.
        mean: Mean of the three channels; None for that of the training images.
        std: Standard deviation of the three channels; None for that of the training images.
        seed: As in `LabelledSet.subset`.

    Raises:
        UserError: A file is missing or damaged, or a limit is below 1.
    """
    root, source = Path(root).expanduser(), _SOURCE[classes]
    try:
        train, test = (source(root, train=part, download=False) for part in (True, False))
    except RuntimeError as error:
        raise UserError(
            f"{root / source.base_folder}: files are missing or damaged; unpack {source.url} in {root}"
        ) from error
    whole = LabelledSet(
        f"cifar{classes}",
        tuple(train.classes),
        *_tensors(train),
        *_tensors(test),
        mean=MEAN[classes] if mean is None else mean,
        std=STD[classes] if std is None else std,
    )
    return whole.subset(train_per_class, test_per_class, seed)


def _tensors(part: CIFAR10) -> tuple[Tensor, Tensor]:
    """Images uint8 [N, 3, 32, 32] and labels int64 [N]."""
    return torch.from_numpy(part.data).permute(0, 3, 1, 2).contiguous(), torch.tensor(part.targets)


def svhn(
    root: str | Path,
    train_per_class: int | None = None,
    test_per_class: int | None = None,
    mean: Sequence[float] = HALF,
    std: Sequence[float] = HALF,
    seed: int = 0,
) -> LabelledSet:
    """Reads SVHN: 73,257 training and 26,032 test images of 32 x 32 pixels, classes 0 to 9.

    Args:
        root: The folder that holds ``train_32x32.mat`` and ``test_32x32.mat``.
        train_per_class: As in `LabelledSet.subset`.
        test_per_class: As in `LabelledSet.subset`.
        mean: Mean of the three channels.
        std: Standard deviation of the three channels.
        seed: As in `LabelledSet.subset`.

    Raises:
        UserError: A file is missing or damaged, or a limit is below 1.
    """
    root = Path(root).expanduser()
    whole = LabelledSet(
        "svhn", tuple(map(str, range(10))), *_read_svhn(root, "train"), *_read_svhn(root, "test"), mean, std
    )
    return whole.subset(train_per_class, test_per_class, seed)


def _read_svhn(root: Path, split: str) -> tuple[Tensor, Tensor]:
    """Images uint8 [N, 3, 32, 32] and labels int64 [N]."""
    try:
        part = SVHN(root, split=split, download=False)
    except RuntimeError as error:
        address, file, _ = SVHN.split_list[split]
        raise UserError(f"{root / file}: is missing or damaged; get it from {address}") from error
    return torch.from_numpy(part.data).contiguous(), torch.from_numpy(part.labels)


CLASSES = ("airplane", "bird", "car", "cat", "deer", "dog", "horse", "monkey", "ship", "truck")


class LabelledSTL10(STL10):
    """STL-10 without its unlabelled files (2.6 GB), which are neither needed nor checked."""

    train_list = STL10.train_list[:2]


def stl10(
    root: str | Path,
    size: int = 32,
    train_per_class: int | None = None,
    test_per_class: int | None = None,
    mean: Sequence[float] = HALF,
    std: Sequence[float] = HALF,
    seed: int = 0,
) -> LabelledSet:
    """Reads STL-10: 5,000 training and 8,000 test images of 96 x 96 pixels in 10 classes.

    Args:
        root: The folder that holds ``stl10_binary``.
        size: Side that images are scaled to (bilinear, antialiased); FedVCK takes 32.
        train_per_class: As in `LabelledSet.subset`.
        test_per_class: As in `LabelledSet.subset`.
        mean: Mean of each channel in [0, 1], or of all.
        std: Standard deviation, likewise.
        seed: As in `LabelledSet.subset`.

    Raises:
        UserError: A file is missing or damaged, or a limit is below 1.
    """
    root = Path(root).expanduser()
    whole = LabelledSet("stl10", CLASSES, *_read_stl10(root, "train"), *_read_stl10(root, "test"), mean, std)
    part = whole.subset(train_per_class, test_per_class, seed)
    return replace(
        part,
        train_images=resized(part.train_images, size, size),
        test_images=resized(part.test_images, size, size),
    )


def _read_stl10(root: Path, split: str) -> tuple[Tensor, Tensor]:
    """Images uint8 [N, 3, 96, 96] and labels int64 [N]."""
    try:
        part = LabelledSTL10(root, split=split, download=False)
    except RuntimeError as error:
        raise UserError(
            f"{root / STL10.base_folder}: files are missing or damaged; unpack {STL10.url} in {root}"
        ) from error
    return torch.from_numpy(part.data), torch.as_tensor(part.labels).long()
