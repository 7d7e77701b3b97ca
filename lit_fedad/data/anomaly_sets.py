"""Public sets for anomaly detection as downloaded: KolektorSDD2, Texture-AD, VisA, Real-IAD and those of MedIAnomaly.

Each set lists its images in a way of its own: by file names, in numbered folders, or in a table.
"""

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from lit_fedad.core.errors import UserError
from lit_fedad.core.files import expand_home
from lit_fedad.data.image_files import LeftOut, folder_name, images_in
from lit_fedad.data.input_files import inside, read_json, read_table, require_files
from lit_fedad.data.masks import marked_pixels
from lit_fedad.data.mvtec import mvtec_mixture
from lit_fedad.data.pictures import open_picture
from lit_fedad.data.sample import ImageSet, Sample
from lit_fedad.data.subset import choose_products, limited, require_known

_MASK_SUFFIX = "_GT"
_COPY_SUFFIX = " (copy)"
_PRODUCT = "surface"


@limited
def kolektor_sdd2(
    root: str | Path,
    name: str = "kolektor_sdd2",
) -> ImageSet:
    """Reads KolektorSDD2; training images with a defect are left out.

    Args:
        root: The unpacked folder, with ``train`` and ``test``.
        name: Name of the image set.

    Returns:
        The image set with one product, images by name.

    Raises:
        UserError: A folder or a mask is missing, or a mask cannot be read.
    """
    root = expand_home(root)
    skipped = LeftOut()
    train, test = _samples(root / "train", skipped), _samples(root / "test", skipped)
    skipped.warn(root)
    normal = [sample for sample in train if not sample.label]
    if len(normal) < len(train):
        warnings.warn(
            f"{root}: {len(train) - len(normal)} of {len(train)} training images show a defect and are left out",
            stacklevel=3,
        )
    return ImageSet(name, tuple(normal), tuple(test))


def _samples(folder: Path, skipped: LeftOut) -> list[Sample]:
    files = images_in(folder, skipped, masks=True)
    # The archive holds two such files, "10301 (copy).png" and "10301_GT (copy).png".
    names = {path.stem for path in files}
    copies = dict.fromkeys(
        path
        for path in files
        if path.stem.endswith(_COPY_SUFFIX) and path.stem.removesuffix(_COPY_SUFFIX) in names
    )
    skipped.add("copies", copies)
    files = [path for path in files if path not in copies]
    masks = {
        path.with_name(path.stem.removesuffix(_MASK_SUFFIX)): path
        for path in files
        if path.stem.endswith(_MASK_SUFFIX)
    }
    images = [path for path in files if not path.stem.endswith(_MASK_SUFFIX)]
    missing = [path for path in images if path.with_suffix("") not in masks]
    if missing:
        raise UserError(
            f"{missing[0]}: no mask {missing[0].stem}{_MASK_SUFFIX}.png beside it ({len(missing)} of {len(images)}"
            " missing); unpack the download again"
        )
    return [
        Sample(path, _PRODUCT, "defect", mask)
        if marked_pixels(open_picture(mask), mask).any()
        else Sample(path, _PRODUCT)
        for path, mask in ((path, masks[path.with_suffix("")]) for path in images)
    ]


@limited
def texture_ad(
    root: str | Path,
    material: Literal["wafer", "cloth", "metal"] = "wafer",
    products: Sequence[str | int] | None = None,
    name: str | None = None,
) -> ImageSet:
    """Reads one material of Texture-AD.

    Its products are ``<number>/train/good``, ``<number>/test/{good,0}`` and ``<number>/ground_truth/0``, where a mask
    is called like its image. They lie in ``root``, or below it in ``<material>_mvtec_format``, ``<Material>`` or both.
    This layout is taken from public code that reads the set; the publisher's page describes none.

    Args:
        root: The folder described above.
        material: The material that is read.
        products: Numbers such as 3; None takes all. A product is called ``<material>_<number>``.
        name: Name of the image set; by default the material.

    Returns:
        The image set, products in ascending order of their numbers.

    Raises:
        UserError: The layout is another one, or `mvtec_mixture` refuses a product.
    """
    root = expand_home(root)
    folder, numbers = _products(root, material)
    images = mvtec_mixture(folder, choose_products(products, numbers, folder), name or material)
    # In a mixture, a bare number would clash with those of the other materials.
    return images.renamed(lambda number: f"{material}_{number}")


def _products(root: Path, material: str) -> tuple[Path, list[str]]:
    """Finds the folder of a material, and the numbers of the products in it."""
    formatted, titled = root / f"{material}_mvtec_format", root / material.title()
    for folder in (root, formatted, titled, titled / formatted.name):
        numbers = [path.parents[1].name for path in folder.glob("*/train/good")]
        if numbers and all(number.isdecimal() for number in numbers):
            return folder, sorted(numbers, key=int)
    raise UserError(
        f"{root}: no numbered folder with train/good inside, neither here nor in {formatted.name} or {titled.name};"
        " give the folder of Texture-AD, or use data=mvtec_mixture for another layout"
    )


_COLUMNS = ("object", "split", "label", "image", "mask")


@limited
def visa(
    root: str | Path,
    products: Sequence[str] | None = None,
    split_csv: str = "split_csv/1cls.csv",
    name: str = "visa",
) -> ImageSet:
    """Reads VisA by one of its split files.

    The split files name no kinds of defect: every anomalous image has the defect ``anomaly``.

    Args:
        root: The unpacked folder ``VisA``.
        products: Objects such as ``pcb1``; None takes all twelve.
        split_csv: Split file below ``root``, with the columns object, split (``train`` or ``test``), label
            (``normal`` or ``anomaly``), image and mask, both below ``root``.
        name: Name of the image set.

    Returns:
        The image set, with masks, products as given, images as in the file.

    Raises:
        UserError: The file is missing or of another form, it names a file that is missing or not below ``root``, or an
            anomalous image is for training.
    """
    root = expand_home(root)
    table = root / split_csv
    rows = _rows(table)
    chosen = choose_products(products, list(dict.fromkeys(row["object"] for row in rows)), table)
    listed = [row for product in chosen for row in rows if row["object"] == product]
    train, test = (
        [_visa_sample(root, row, table) for row in listed if row["split"] == part]
        for part in ("train", "test")
    )
    _check(train, test, table, "split_csv", "unpack the archive again")
    return ImageSet(name, tuple(train), tuple(test))


def _rows(table: Path) -> list[dict[str, str]]:
    columns, rows = read_table(table)
    for column in _COLUMNS:
        require_known(column, columns, f"{table}: no column '{column}'")
    for line, row in enumerate(rows, start=2):
        valid = row["split"] in ("train", "test") and row["label"] in ("normal", "anomaly")
        if not (valid and row["image"]):
            raise UserError(
                f"{table}: line {line} has split '{row['split']}', label '{row['label']}' and image"
                f" '{row['image']}'; give train or test, normal or anomaly, and a path"
            )
    if not rows:
        raise UserError(f"{table}: holds no row; unpack it again")
    return rows


def _visa_sample(root: Path, row: dict[str, str], table: Path) -> Sample:
    image = inside(root, row["image"], table)
    if row["label"] == "normal":
        return Sample(image, row["object"])
    return Sample(image, row["object"], "anomaly", inside(root, row["mask"], table) if row["mask"] else None)


@limited
def real_iad(
    root: str | Path,
    images: str = "realiad_1024",
    split: str = "realiad_jsons/realiad_jsons",
    products: Sequence[str] | None = None,
    name: str = "real_iad",
) -> ImageSet:
    """Reads Real-IAD by one of its folders of split files.

    Args:
        root: The folder that holds images and split files.
        images: Folder of images below ``root``: ``realiad_256``, ``realiad_512``, ``realiad_1024`` or ``realiad_raw``.
        split: Folder of JSON files below ``root``; ``realiad_jsons_sv`` has one view of each object.
        products: Products such as ``audiojack``; None takes all that have a file.
        name: Name of the image set.

    Returns:
        The image set, with masks, products as given or by name, images as in the files.

    Raises:
        UserError: A file is missing or of another form, names a path outside of the set or a file that is not there,
            or an image with a defect is for training.
    """
    root = expand_home(root)
    folder = root / split
    names = sorted(path.stem for path in folder.glob("*.json")) if folder.is_dir() else []
    if not names:
        raise UserError(f"{folder}: holds no JSON file; give the folder of split files as data.split")
    train: list[Sample] = []
    test: list[Sample] = []
    for product in choose_products(products, names, folder):
        train_samples, test_samples = _split_samples(folder / f"{product}.json", root / images / product)
        train += train_samples
        test += test_samples
    _check(train, test, folder, "split", "check data.images")
    return ImageSet(name, tuple(train), tuple(test))


def _check(train: Sequence[Sample], test: Sequence[Sample], source: Path, key: str, advice: str) -> None:
    """Refuses images that are missing, and anomalous images for training."""
    require_files([file for sample in (*train, *test) for file in sample.files], source, advice)
    if anomalous := [sample for sample in train if sample.label]:
        raise UserError(
            f"{source}: {anomalous[0].path} shows '{anomalous[0].defect}', but is for training; use another data.{key}"
        )


def _split_samples(table: Path, folder: Path) -> tuple[list[Sample], list[Sample]]:
    """Reads the training and test images in ``folder`` from the split file of a product, ``<product>.json``."""
    content = read_json(table)
    try:
        normal = content["meta"]["normal_class"]
        train, test = (
            [_real_iad_sample(entry, normal, folder, table) for entry in content[part]]
            for part in ("train", "test")
        )
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise UserError(f"{table}: is no split file of Real-IAD ({error!r}); unpack it again") from error
    return train, test


def _real_iad_sample(entry: Mapping[str, Any], normal: str, folder: Path, table: Path) -> Sample:
    image, relative_mask = inside(folder, entry["image_path"], table), entry.get("mask_path")
    if entry["anomaly_class"] == normal:
        return Sample(image, table.stem)
    mask_path = inside(folder, relative_mask, table) if relative_mask else None
    return Sample(image, table.stem, str(entry["anomaly_class"]), mask_path)


def medianomaly(root: str | Path, name: str | None = None) -> ImageSet:
    """Reads one set of MedIAnomaly with its own split.

    Args:
        root: The folder of the set.
        name: Name of the set and of its one product; by default the name of ``root``.

    Returns:
        The image set, in the order of ``data.json``. It has no masks.

    Raises:
        UserError: ``data.json`` or an image is missing, the file is of another form or names a path outside of the
            set, or an image is listed for training and for testing.
    """
    root = expand_home(root)
    index = root / "data.json"
    split = read_json(index)
    try:
        parts = [split["train"]["0"], split["test"]["0"], split["test"]["1"]]
        folder = root / "images"
        train, normal, anomalous = ([inside(folder, file, index) for file in files] for files in parts)
    except (KeyError, TypeError) as error:
        raise UserError(f"{index}: needs lists of file names under train.0, test.0 and test.1") from error

    if leaked := set(train) & {*normal, *anomalous}:
        raise UserError(f"{index}: lists {min(leaked).name} for training and for testing; remove it from one")
    require_files([*train, *normal, *anomalous], index, "unpack the set again")

    product = name or folder_name(root)
    train_samples = tuple(Sample(path, product) for path in train)
    test_samples = (
        *(Sample(path, product) for path in normal),
        *(Sample(path, product, "anomalous") for path in anomalous),
    )
    return ImageSet(product, train_samples, test_samples)
