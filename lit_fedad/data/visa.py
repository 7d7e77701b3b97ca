"""VisA, as downloaded: one folder an object, and CSV files with the split into training and test images.

The archive holds ``<object>/Data/Images/{Normal,Anomaly}``, ``<object>/Data/Masks/Anomaly`` and ``split_csv``.
Source: Zou et al., "SPot-the-Difference Self-Supervised Pre-training for Anomaly Detection and Segmentation",
ECCV 2022.
"""

import csv
from collections.abc import Sequence
from pathlib import Path

from lit_fedad.data.input_files import require_files
from lit_fedad.data.products import choose_products
from lit_fedad.data.sample import ImageSet, Sample
from lit_fedad.data.subset import subset
from lit_fedad.errors import UserError

_COLUMNS = ("object", "split", "label", "image", "mask")


def visa(
    root: str | Path,
    products: Sequence[str] | None = None,
    split_csv: str = "split_csv/1cls.csv",
    name: str = "visa",
    train_per_product: int | None = None,
    test_per_product: int | None = None,
    seed: int = 0,
) -> ImageSet:
    """Reads VisA by one of its split files.

    The split files name no kinds of defect: every anomalous image has the defect ``anomaly``.

    Args:
        root: The unpacked folder ``VisA``.
        products: Objects such as ``pcb1``; None takes all twelve.
        split_csv: Split file below ``root``, with the columns object, split (``train`` or ``test``), label
            (``normal`` or ``anomaly``), image and mask, both below ``root``.
        name: Name of the image set.
        train_per_product: As in `subset`.
        test_per_product: As in `subset`.
        seed: As in `subset`.

    Returns:
        The image set, with masks, products as given, images as in the file.

    Raises:
        UserError: The file is missing or of another form, it names a file that is missing, or an anomalous image is
            for training.
    """
    root = Path(root).expanduser()
    table = root / split_csv
    rows = _rows(table)
    chosen = choose_products(products, list(dict.fromkeys(row["object"] for row in rows)), table)
    train: list[Sample] = []
    test: list[Sample] = []
    for product in chosen:
        own = [row for row in rows if row["object"] == product]
        train += [_sample(root, row) for row in own if row["split"] == "train"]
        test += [_sample(root, row) for row in own if row["split"] == "test"]
    for sample in train:
        if sample.label:
            raise UserError(
                f"{table}: {sample.path} is anomalous, but for training; use split_csv/1cls.csv, where none is"
            )
    require_files([*train, *test], table, "unpack the archive again")
    return subset(ImageSet(name, tuple(train), tuple(test)), train_per_product, test_per_product, seed)


def _rows(table: Path) -> list[dict[str, str]]:
    if not table.is_file():
        raise UserError(f"{table}: no such file; root is the unpacked folder VisA, with split_csv in it")
    with table.open(newline="") as file:
        reader = csv.DictReader(file)
        missing = [column for column in _COLUMNS if column not in (reader.fieldnames or [])]
        if missing:
            raise UserError(f"{table}: no column '{missing[0]}'; a split file has {', '.join(_COLUMNS)}")
        rows = list(reader)
    for line, row in enumerate(rows, start=2):
        known = row["split"] in ("train", "test") and row["label"] in ("normal", "anomaly")
        if not (known and row["image"]):
            raise UserError(
                f"{table}: line {line} has split '{row['split']}', label '{row['label']}' and image"
                f" '{row['image']}'; give train or test, normal or anomaly, and a path"
            )
    if not rows:
        raise UserError(f"{table}: holds no row; unpack it again")
    return rows


def _sample(root: Path, row: dict[str, str]) -> Sample:
    if row["label"] == "normal":
        return Sample(root / row["image"], row["object"])
    return Sample(root / row["image"], row["object"], "anomaly", root / row["mask"] if row["mask"] else None)
