"""CIFAR-10 and CIFAR-100 as their authors distribute them (Krizhevsky, 2009)."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor
from torchvision.datasets import CIFAR10, CIFAR100

from lit_fedad.data.labelled import LabelledSet
from lit_fedad.errors import UserError

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
