"""ImageNette: ten classes of ImageNet that are easily distinguished (Howard, 2019)."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from torchvision.datasets import ImageFolder

from lit_fedad.data.labelled import HALF, LabelledSet, read_balanced
from lit_fedad.errors import UserError

ADDRESS = "https://s3.amazonaws.com/fast-ai-imageclas/imagenette2-160.tgz"

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
        raise UserError(f"{root}: holds {found}; unpack {ADDRESS}, and give its folder as root")
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
        raise UserError(f"{folder}: is missing or lacks images; unpack {ADDRESS} anew") from error
    if images.classes != list(CLASSES):
        odd = sorted(set(images.classes) ^ set(CLASSES))
        raise UserError(f"{folder}: must hold the ten folders of ImageNette and no other, see {odd[0]}")
    return [Path(path) for path, _ in images.samples], torch.tensor(images.targets)
