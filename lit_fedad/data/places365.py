"""Places365 at 256 x 256 pixels, as its authors distribute it (Zhou et al., 2018); only what is drawn is read."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torchvision.datasets import Places365

from lit_fedad.data.arrays import draw, read_images
from lit_fedad.data.labelled import HALF, LabelledSet
from lit_fedad.errors import UserError


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
