"""Unlabelled images below a folder, such as an out-of-distribution set, in memory at one size."""

from collections.abc import Sequence
from pathlib import Path

import torch

from lit_fedad.data.arrays import draw, read_images
from lit_fedad.data.labelled import HALF, LabelledSet
from lit_fedad.data.sample import IMAGE_SUFFIXES
from lit_fedad.errors import UserError


def image_folder(
    root: str | Path,
    test: str,
    train: str | None = None,
    size: int = 32,
    train_images: int | None = None,
    test_images: int | None = None,
    name: str | None = None,
    mean: Sequence[float] = HALF,
    std: Sequence[float] = HALF,
    seed: int = 0,
) -> LabelledSet:
    """Reads the images of one or two folders as a set of a single class.

    Args:
        root: The folder that the others are relative to.
        test: Folder of the test images.
        train: Folder of the training images; None for a set that is only tested on.
        size: Side of the square images in pixels; see `read_images`.
        train_images: At most this many random training images; None takes all. Only those drawn are read.
        test_images: At most this many random test images, likewise.
        name: Name of the set and of its one class; by default the name of ``root``.
        mean: Mean of the three channels in [0, 1].
        std: Standard deviation of the three channels.
        seed: Seed of the two draws.

    Raises:
        UserError: A folder is missing, holds no image or is given for both parts, an image cannot be read, or a
            limit is below 0.
    """
    root = Path(root).expanduser()
    if train == test:
        raise UserError(f"{root / test}: is given for training and for testing; use each folder once")
    training, testing = (
        [files[i] for i in draw(len(files), limit, key, seed)]
        for files, limit, key in (
            (images_below(root / train) if train else [], train_images, "train_images"),
            (images_below(root / test), test_images, "test_images"),
        )
    )
    name = name or root.absolute().name
    return LabelledSet(
        name,
        (name,),
        *(read_images(training, size), torch.zeros(len(training), dtype=torch.int64)),
        *(read_images(testing, size), torch.zeros(len(testing), dtype=torch.int64)),
        *(mean, std),
    )


def images_below(folder: Path) -> list[Path]:
    """Lists the images in a folder and in those below it, by path; hidden files and folders are left out.

    Raises:
        UserError: There is no such folder, or no image in it.
    """
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; correct its name, or make a link of that name")
    images = sorted(
        path
        for path in folder.rglob("*")
        if path.suffix.lower() in IMAGE_SUFFIXES
        and not any(part.startswith(".") for part in path.relative_to(folder).parts)
    )
    if not images:
        raise UserError(f"{folder}: holds no image ({', '.join(IMAGE_SUFFIXES)})")
    return images
