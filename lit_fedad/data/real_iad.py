"""Real-IAD, as downloaded: folders of images by product, and a JSON file a product with the split.

``<images>/<product>/...`` has images and masks; ``<split>/<product>.json`` has ``meta`` with the name of the normal
class, and lists ``train`` and ``test`` of ``anomaly_class``, ``image_path`` and ``mask_path``, both below the product's
images. Source: Wang et al., "Real-IAD: A Real-World Multi-View Dataset for Benchmarking Versatile Industrial
Anomaly Detection", CVPR 2024.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from lit_fedad.data.input_files import read_json, require_files
from lit_fedad.data.products import choose_products
from lit_fedad.data.sample import ImageSet, Sample
from lit_fedad.data.subset import subset
from lit_fedad.errors import UserError


def real_iad(
    root: str | Path,
    images: str = "realiad_1024",
    split: str = "realiad_jsons/realiad_jsons",
    products: Sequence[str] | None = None,
    name: str = "real_iad",
    train_per_product: int | None = None,
    test_per_product: int | None = None,
    seed: int = 0,
) -> ImageSet:
    """Reads Real-IAD by one of its folders of split files.

    Args:
        root: The folder of both.
        images: Folder of images below ``root``: ``realiad_256``, ``realiad_512``, ``realiad_1024`` or ``realiad_raw``.
        split: Folder of JSON files below ``root``; ``realiad_jsons_sv`` has one view of each object.
        products: Products such as ``audiojack``; None takes all that have a file.
        name: Name of the image set.
        train_per_product: As in `subset`.
        test_per_product: As in `subset`.
        seed: As in `subset`.

    Returns:
        The image set, with masks, products as given or by name, images as in the files.

    Raises:
        UserError: A file is missing or of another form, names a path outside of the set or a file that is not there,
            or an image with a defect is for training.
    """
    root = Path(root).expanduser()
    folder = root / split
    known = sorted(path.stem for path in folder.glob("*.json")) if folder.is_dir() else []
    if not known:
        raise UserError(f"{folder}: holds no JSON file; give the folder of split files as data.split")
    train: list[Sample] = []
    test: list[Sample] = []
    for product in choose_products(products, known, folder):
        table = folder / f"{product}.json"
        content = _content(table)
        place = root / images / product
        train += [_sample(entry, content, place, product, table) for entry in content["train"]]
        test += [_sample(entry, content, place, product, table) for entry in content["test"]]
    for sample in train:
        if sample.label:
            raise UserError(
                f"{folder}: {sample.path} shows '{sample.defect}', but is for training; use another data.split"
            )
    require_files([*train, *test], folder, "check data.images")
    return subset(ImageSet(name, tuple(train), tuple(test)), train_per_product, test_per_product, seed)


def _content(table: Path) -> Mapping[str, Any]:
    try:
        content = read_json(table)
        _ = content["meta"]["normal_class"]
        if not all(isinstance(content[part], list) for part in ("train", "test")):
            raise TypeError
    except (OSError, ValueError) as error:
        raise UserError(f"{table}: cannot be read as JSON ({' '.join(str(error).split())})") from error
    except (KeyError, TypeError, IndexError) as error:
        raise UserError(
            f"{table}: is no split file of Real-IAD (meta.normal_class, train and test); unpack it again"
        ) from error
    return content  # type: ignore[no-any-return]


def _sample(entry: Any, content: Mapping[str, Any], place: Path, product: str, table: Path) -> Sample:
    try:
        kind, image, mask = entry["anomaly_class"], entry["image_path"], entry.get("mask_path")
        path, marks = _inside(place, image), _inside(place, mask) if mask else None
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise UserError(f"{table}: {str(entry)[:80]} is no image of the set; unpack it again") from error
    if kind == content["meta"]["normal_class"]:
        return Sample(path, product)
    return Sample(path, product, str(kind), marks)


def _inside(place: Path, relative: str) -> Path:
    path = PurePosixPath(relative)
    if path.is_absolute() or ".." in path.parts:
        raise ValueError(relative)
    return place / path
