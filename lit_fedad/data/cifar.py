"""CIFAR-10 and CIFAR-100 as their authors distribute them (Krizhevsky, 2009)."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from torchvision.datasets import CIFAR10, CIFAR100

from lit_fedad.data.labelled import LabelledSet
from lit_fedad.errors import UserError

CIFAR10_MEAN = (0.4914, 0.4822, 0.4465)
CIFAR10_STD = (0.2470, 0.2435, 0.2616)
CIFAR100_MEAN = (0.5071, 0.4865, 0.4409)
CIFAR100_STD = (0.2673, 0.2564, 0.2762)


def cifar10(
    root: str | Path,
    train_per_class: int | None = None,
    test_per_class: int | None = None,
    mean: Sequence[float] = CIFAR10_MEAN,
    std: Sequence[float] = CIFAR10_STD,
    seed: int = 0,
) -> LabelledSet:
    """Reads CIFAR-10: 50,000 training and 10,000 test images of 32 x 32 pixels in 10 classes.

    Args:
        root: The folder that holds ``cifar-10-batches-py``.
        train_per_class: As in `LabelledSet.subset`.
        test_per_class: As in `LabelledSet.subset`.
        mean: Mean of the three channels; by default that of the training images.
        std: Standard deviation of the three channels; by default that of the training images.
        seed: As in `LabelledSet.subset`.

    Raises:
        UserError: A file is missing or damaged, or a limit is below 1.
    """
    whole = _read(CIFAR10, root, "cifar10", mean, std)
    return whole.subset(train_per_class, test_per_class, seed)


def cifar100(
    root: str | Path,
    train_per_class: int | None = None,
    test_per_class: int | None = None,
    mean: Sequence[float] = CIFAR100_MEAN,
    std: Sequence[float] = CIFAR100_STD,
    seed: int = 0,
) -> LabelledSet:
    """Reads CIFAR-100: 50,000 training and 10,000 test images of 32 x 32 pixels in 100 (fine) classes.

    Args:
        root: The folder that holds ``cifar-100-python``.
        train_per_class: As in `LabelledSet.subset`.
        test_per_class: As in `LabelledSet.subset`.
        mean: Mean of the three channels; by default that of the training images.
        std: Standard deviation of the three channels; by default that of the training images.
        seed: As in `LabelledSet.subset`.

    Raises:
        UserError: A file is missing or damaged, or a limit is below 1.
    """
    whole = _read(CIFAR100, root, "cifar100", mean, std)
    return whole.subset(train_per_class, test_per_class, seed)


def _read(
    source: type[CIFAR10], root: str | Path, name: str, mean: Sequence[float], std: Sequence[float]
) -> LabelledSet:
    root = Path(root).expanduser()
    try:
        train, test = (source(root, train=part, download=False) for part in (True, False))
    except RuntimeError as error:
        raise UserError(
            f"{root / source.base_folder}: files are missing or damaged; unpack {source.url} in {root}"
        ) from error
    return LabelledSet(name, tuple(train.classes), *_tensors(train), *_tensors(test), mean, std)


def _tensors(part: CIFAR10) -> tuple[Tensor, Tensor]:
    """Images uint8 [N, 3, 32, 32] and labels int64 [N]."""
    return torch.from_numpy(part.data).permute(0, 3, 1, 2).contiguous(), torch.tensor(part.targets)
