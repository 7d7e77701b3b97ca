"""Street View House Numbers, cropped digits, as their authors distribute them (Netzer et al., 2011)."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from torchvision.datasets import SVHN

from lit_fedad.data.labelled import HALF, LabelledSet
from lit_fedad.errors import UserError


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
        "svhn", tuple(map(str, range(10))), *_read(root, "train"), *_read(root, "test"), mean, std
    )
    return whole.subset(train_per_class, test_per_class, seed)


def _read(root: Path, split: str) -> tuple[Tensor, Tensor]:
    """Images uint8 [N, 3, 32, 32] and labels int64 [N]."""
    try:
        part = SVHN(root, split=split, download=False)
    except RuntimeError as error:
        address, file, _ = SVHN.split_list[split]
        raise UserError(f"{root / file}: is missing or damaged; get it from {address}") from error
    return torch.from_numpy(part.data).contiguous(), torch.from_numpy(part.labels)
