"""Tiny ImageNet as its authors distribute it (Le and Yang, 2015)."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from lit_fedad.data.labelled import LabelledSet, read_balanced
from lit_fedad.errors import UserError

FOLDER = "tiny-imagenet-200"
ADDRESS = f"http://cs231n.stanford.edu/{FOLDER}.zip"
SIDE = 64

TINY_IMAGENET_MEAN = (0.4802, 0.4481, 0.3975)
TINY_IMAGENET_STD = (0.2770, 0.2691, 0.2821)


def tiny_imagenet(
    root: str | Path,
    train_per_class: int | None = None,
    test_per_class: int | None = None,
    mean: Sequence[float] = TINY_IMAGENET_MEAN,
    std: Sequence[float] = TINY_IMAGENET_STD,
    seed: int = 0,
) -> LabelledSet:
    """Reads Tiny ImageNet: 100,000 training images of 64 x 64 pixels in 200 classes, and 10,000 for testing.

    These are its validation images: the labels of its own test images are not published. Classes come in the
    order of ``wnids.txt``.

    Args:
        root: The folder ``tiny-imagenet-200``, or the one that holds it.
        train_per_class: As in `LabelledSet.subset`; only images that are drawn are read.
        test_per_class: Likewise.
        mean: Mean of the three channels; by default what is commonly taken for this set.
        std: Standard deviation of the three channels; likewise.
        seed: As in `LabelledSet.subset`.

    Raises:
        UserError: A file is missing or damaged, or a limit is below 1.
    """
    root = Path(root).expanduser()
    folder = root / FOLDER if (root / FOLDER).is_dir() else root
    labels = {wnid: label for label, wnid in enumerate(_lines(folder / "wnids.txt"))}
    train, test = _training(folder / "train", labels), _validation(folder / "val", labels)
    return LabelledSet(
        "tiny_imagenet",
        _class_names(folder / "words.txt", list(labels)),
        *read_balanced(*train, "train", train_per_class, seed, SIDE),
        *read_balanced(*test, "test", test_per_class, seed, SIDE),
        *(mean, std),
    )


def _training(folder: Path, labels: Mapping[str, int]) -> tuple[list[Path], Tensor]:
    """The image files, class by class, and their labels, int64 [N]."""
    files = [sorted((folder / wnid / "images").glob("*.JPEG")) for wnid in labels]
    for wnid, own in zip(labels, files, strict=True):
        if not own:
            raise UserError(f"{folder / wnid / 'images'}: holds no image (*.JPEG); unpack {ADDRESS} anew")
    labels_of = [label for label, own in enumerate(files) for _ in own]
    return [file for own in files for file in own], torch.tensor(labels_of)


def _validation(folder: Path, labels: Mapping[str, int]) -> tuple[list[Path], Tensor]:
    """The image files in the order of their annotations, and their labels, int64 [N]."""
    annotations = folder / "val_annotations.txt"
    # Name, class and the corners of a box.
    rows = [line.split("\t") for line in _lines(annotations)]
    for number, row in enumerate(rows, 1):
        if len(row) < 2 or row[1] not in labels:
            raise UserError(
                f"{annotations}: line {number} names no image and class of wnids.txt; unpack {ADDRESS} anew"
            )
    return [folder / "images" / row[0] for row in rows], torch.tensor([labels[row[1]] for row in rows])


def _class_names(path: Path, wnids: Sequence[str]) -> tuple[str, ...]:
    """The first of the synonyms of each class; its WordNet number where another class has the same."""
    synonyms = dict(line.split("\t", 1) for line in _lines(path) if "\t" in line)
    first = [synonyms.get(wnid, wnid).split(",")[0] for wnid in wnids]
    count = Counter(first)
    return tuple(name if count[name] == 1 else wnid for name, wnid in zip(first, wnids, strict=True))


def _lines(path: Path) -> list[str]:
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        raise UserError(f"{path}: cannot be read; unpack {ADDRESS}, and give its folder as root") from error
    if not lines:
        raise UserError(f"{path}: is empty; unpack {ADDRESS} anew")
    return lines
