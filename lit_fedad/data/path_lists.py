"""Images that are listed one by one in a CSV file, with their client and label."""

import csv
import io
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from lit_fedad.core.errors import UserError
from lit_fedad.core.files import expand_home
from lit_fedad.data.input_files import require_files, written_rows
from lit_fedad.data.sample import ImageSet, Sample
from lit_fedad.data.subset import split_normals

_COLUMNS = ("part", "product", "defect", "path")


def path_lists(file: str | Path, name: str = "images", train_share: float = 0.8, seed: int = 0) -> ImageSet:
    """Reads a list of images.

    Args:
        file: The CSV file, whose text `list_text` writes.
        name: Name of the set.
        train_share: Share of each product's images that is for training where the list has no test images.
        seed: Seed of that split.

    Returns:
        The image set in the order of the file. It has no masks.

    Raises:
        UserError: The file or an image is missing, the file is no such list, or it has no test images and an image
            twice.
    """
    parts: dict[str, list[Sample]] = {"train": [], "test": []}
    try:
        rows = written_rows(Path(file), strict=True)
        if set(rows.fieldnames or ()) != set(_COLUMNS):
            raise ValueError("other columns")
        for row in rows:
            parts[row["part"]].append(Sample(Path(row["path"]), row["product"], row["defect"]))
    except OSError as error:
        raise UserError(f"{file}: cannot be read ({error.strerror}); train anew, or restore it") from error
    except (ValueError, LookupError, TypeError, csv.Error) as error:
        raise UserError(f"{file}: is no list of images with columns {', '.join(_COLUMNS)}") from error
    listed = [sample.path for sample in (*parts["train"], *parts["test"])]
    require_files(listed, Path(file), "put it back, or train anew")
    images = ImageSet(name, tuple(parts["train"]), tuple(parts["test"]))
    if images.test:
        return images
    _refuse_repeated(images.train)
    return split_normals(images, train_share, seed)


def _refuse_repeated(samples: Sequence[Sample]) -> None:
    """Refuses an image that is listed more than once where some are drawn for testing."""
    owners: dict[Path, str] = {}
    for sample in samples:
        if sample.path in owners:
            raise UserError(
                f"{sample.path}: is given to {owners[sample.path]} and again to {sample.category}, and would be trained"
                " and tested on; give each image once, or test images by test="
            )
        owners[sample.path] = sample.category


def list_text(
    normal: Mapping[str, Sequence[str | os.PathLike[str]]],
    test: Mapping[str, Mapping[str, Sequence[str | os.PathLike[str]]]],
) -> str:
    """Writes the text of a list of images.

    Args:
        normal: Normal training images by product.
        test: Test images by product, and of each by ``"good"`` or the name of the defect.
    """
    rows = [("train", product, "good", path) for product, paths in normal.items() for path in paths]
    rows += [
        ("test", product, defect, path)
        for product, labelled in test.items()
        for defect, paths in labelled.items()
        for path in paths
    ]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(_COLUMNS)
    writer.writerows([*kind, str(expand_home(path).absolute())] for *kind, path in rows)
    return text.getvalue()
