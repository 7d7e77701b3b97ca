"""STL-10's labelled images as their authors distribute them (Coates, Ng and Lee, AISTATS 2011)."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from torchvision.datasets import STL10

from lit_fedad.data.arrays import resized
from lit_fedad.data.labelled import HALF, LabelledSet
from lit_fedad.errors import UserError

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
    whole = LabelledSet("stl10", CLASSES, *_read(root, "train"), *_read(root, "test"), mean, std)
    part = whole.subset(train_per_class, test_per_class, seed)
    return replace(
        part,
        train_images=resized(part.train_images, size, size),
        test_images=resized(part.test_images, size, size),
    )


def _read(root: Path, split: str) -> tuple[Tensor, Tensor]:
    """Images uint8 [N, 3, 96, 96] and labels int64 [N]."""
    try:
        part = LabelledSTL10(root, split=split, download=False)
    except RuntimeError as error:
        raise UserError(
            f"{root / STL10.base_folder}: files are missing or damaged; unpack {STL10.url} in {root}"
        ) from error
    return torch.from_numpy(part.data), torch.as_tensor(part.labels).long()
