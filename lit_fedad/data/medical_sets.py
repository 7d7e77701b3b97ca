"""MedMNIST: small medical images in official ``.npz`` files (Yang et al., Scientific Data 10:41, 2023)."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Literal

from lit_fedad.core.errors import UserError
from lit_fedad.data.input_files import read_json
from lit_fedad.data.labelled import HALF, LabelledSet
from lit_fedad.data.packed import Channels, packed
from lit_fedad.data.sample import ImageSet, Sample


def medianomaly(root: str | Path, name: str | None = None) -> ImageSet:
    """Reads one set of MedIAnomaly with its own split.

    Args:
        root: The folder of the set.
        name: Name of the set and of its one product; by default the name of ``root``.

    Returns:
        The image set, in the order of ``data.json``. It has no masks.

    Raises:
        UserError: ``data.json`` or an image is missing, or an image is listed for training and for testing.
    """
    root = Path(root).expanduser()
    index = root / "data.json"
    if not index.is_file():
        raise UserError(
            f"{index}: no such file; give the folder of one set, with data.json and images inside"
        )
    try:
        split = read_json(index)
        train, normal, anomalous = split["train"]["0"], split["test"]["0"], split["test"]["1"]
    except ValueError as error:
        raise UserError(f"{index}: is not valid JSON: {error}; unpack the set again") from error
    except (KeyError, TypeError) as error:
        raise UserError(f"{index}: needs lists of file names under train.0, test.0 and test.1") from error

    files = [*train, *normal, *anomalous]
    missing = [file for file in files if not (root / "images" / file).is_file()]
    if missing:
        raise UserError(
            f"{index}: no image {root / 'images' / missing[0]}"
            f" ({len(missing)} of {len(files)} missing); unpack the set again"
        )
    leaked = set(train) & {*normal, *anomalous}
    if leaked:
        raise UserError(f"{index}: lists {min(leaked)} for training and for testing; remove it from one")

    product = name or root.absolute().name

    def samples(names: list[str], defect: str) -> tuple[Sample, ...]:
        return tuple(Sample(root / "images" / file, product, defect) for file in names)

    return ImageSet(
        product, samples(train, "good"), samples(normal, "good") + samples(anomalous, "anomalous")
    )


ADDRESS = "https://medmnist.com"

_ORGANS = (
    *("bladder", "left femur", "right femur", "heart", "left kidney", "right kidney"),
    *("liver", "left lung", "right lung", "pancreas", "spleen"),
)

CLASSES = {
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


def medmnist(
    root: str | Path,
    name: Literal["pathmnist", "octmnist", "organcmnist", "organsmnist", "pneumoniamnist"],
    size: Literal[28, 64, 128, 224] = 28,
    train_per_class: int | None = None,
    test_per_class: int | None = None,
    mean: Sequence[float] = HALF,
    std: Sequence[float] = HALF,
    seed: int = 0,
    channels: Channels = 3,
    download: bool = False,
) -> LabelledSet:
    """Reads the training and test part of a set; the validation part is not used.

    Args:
        root: The folder that holds the official file: ``pathmnist.npz``, at other sizes than 28 ``pathmnist_64.npz``.
        name: Which set. ``pathmnist`` is coloured, the others are grey.
        size: Side of the images in pixels.
        train_per_class: As in `LabelledSet.subset`.
        test_per_class: As in `LabelledSet.subset`.
        mean: Mean of each channel in [0, 1], or of all.
        std: Standard deviation, likewise.
        seed: As in `LabelledSet.subset`.
        channels: As in `packed`.
        download: Whether a missing file is fetched; this takes the package ``medmnist``.

    Raises:
        UserError: The file is missing, damaged or cannot be fetched, or as in `packed`.
    """
    root = Path(root).expanduser()
    path = root / f"{name}{'' if size == 28 else f'_{size}'}.npz"
    if not path.is_file():
        if not download:
            raise UserError(f"{path}: no such file; get it from {ADDRESS}, or give data.download=true")
        _fetch(path, name, size)
    return packed(
        root,
        path.name,
        name=name,
        train_per_class=train_per_class,
        test_per_class=test_per_class,
        mean=mean,
        std=std,
        seed=seed,
        channels=channels,
        classes=CLASSES[name],
    )


def _fetch(path: Path, name: str, size: int) -> None:
    """Lets the data set's own package download the file and check it."""
    try:
        package = import_module("medmnist")
    except ImportError as error:
        raise UserError(
            f"{path}: fetching it takes a package, pip install 'medmnist>=3'; or get it from {ADDRESS}"
        ) from error
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        reader = getattr(package, package.INFO[name]["python_class"])
        reader(split="test", download=True, size=size, root=str(path.parent))
    except (RuntimeError, OSError) as error:
        raise UserError(f"{path}: cannot be fetched; get it from {ADDRESS}") from error
