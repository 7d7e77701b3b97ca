"""One folder of images with their labels in a CSV file: HeadCT, and RSNA and VinDr-CXR as Kaggle has them."""

import os
import re
import warnings
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from unicodedata import normalize

from lit_fedad.core.errors import UserError
from lit_fedad.core.files import expand_home
from lit_fedad.data.image_files import folder_name, image_suffixes, images_in
from lit_fedad.data.input_files import read_table
from lit_fedad.data.layout_names import LABELS, NORMAL, ONE, ZERO, bare, says_normal
from lit_fedad.data.sample import DICOM_SUFFIXES, ImageSet, Sample, defect_name
from lit_fedad.data.subset import require_known, split_normals

FileNames = list[dict[str, list[Path]]]
"""For each kind of name: the files that may be called by it; see `file_names`."""

_MOST_CLASSES = 20
_NO_LABEL = frozenset({"", "nan", "na", "n/a", "<na>", "none", "null", "-"})


def labelled_csv(
    root: str | Path,
    labels: str,
    images: str,
    id_column: str,
    label_column: str,
    normal: Sequence[str | int],
    anomalous: Sequence[str | int] | None = None,
    train_share: float = 0.75,
    seed: int = 0,
    name: str | None = None,
    group: str | None = None,
) -> ImageSet:
    """Reads a set that has no public test labels, and splits it by seed.

    A random ``train_share`` of the normal images is for training; the other normal images and all anomalous ones
    are for testing. With ``group``, images of one patient fall on one side: groups with an anomalous image are for
    testing, and of the others whole groups are for training, until they hold that share of the normal images.
    Without it, images of one patient under two ids may fall on both sides.

    An image may have several rows, one for each reader or finding. It is anomalous if any row is, and called after
    the most frequent of these labels; it is normal if every row is.

    Args:
        root: The folder that ``labels`` and ``images`` are relative to.
        labels: The CSV file, with a header.
        images: The folder of images; images without a row are left out.
        id_column: Column of file names, with or without suffix and folders (those below ``images``, or below ``root``).
            They are compared as written, but for the kind of slash. A number may lack leading zeros where no file has
            it as its name: HeadCT's ``0`` is ``000.png``.
        label_column: Column of labels. An empty cell, or what pandas writes for one, is no label: the row is left out.
        normal: Labels of normal rows.
        anomalous: Labels of anomalous rows; None takes all that are not normal. Images with neither are left out.
        train_share: Share of the normal images that is for training, between 0 and 1.
        seed: Seed of the split, which does not depend on the order of rows.
        name: Name of the set and of its one product; by default the name of ``root``.
        group: Regular expression: images whose paths it finds the same text in (a patient) stay together; None where
            every image is a group of its own.

    Returns:
        The image set, images by name. It has no masks.

    Raises:
        UserError: The file, a column, a label or an image is missing, labels differ from normal ones by their case
            alone, or ``train_share`` is out of range.
    """
    root = expand_home(root)
    table = root / labels
    good = {_without_decimals(str(label)) for label in normal}
    named = good | {_without_decimals(str(label)) for label in anomalous or ()}
    counts_by_image = _label_counts(table, id_column, label_column, named)
    listed = set().union(*counts_by_image.values())
    bad = listed - good if anomalous is None else {_without_decimals(str(label)) for label in anomalous}
    for label in sorted(good | bad):
        key = "normal" if label in good else "anomalous"
        require_known(label, listed, f"{table}: no '{label}' ({key}) in column '{label_column}'")
    normal_by_case = {label.casefold(): label for label in good}
    if anomalous is None and (odd := sorted(label for label in bad if label.casefold() in normal_by_case)):
        raise UserError(
            f"{table}: '{odd[0]}' would be anomalous and '{normal_by_case[odd[0].casefold()]}' normal; give both as"
            " normal, or write labels in one way"
        )

    defects: dict[str, str] = {}
    for image, counts in counts_by_image.items():
        findings = [label for label, _ in counts.most_common() if label in bad]
        if findings:
            defects[image] = defect_name(findings[0])
        elif good.issuperset(counts):
            defects[image] = "good"
    paths = _paths(defects, root, root / images, table, counts_by_image.keys())

    product = name or folder_name(root)
    samples = [
        Sample(paths[image], product, defects[image]) for image in sorted(defects, key=paths.__getitem__)
    ]
    normals, others = (tuple(sample for sample in samples if sample.label == label) for label in (0, 1))
    return split_normals(ImageSet(product, normals, others), train_share, seed, group)


def _label_counts(
    table: Path, id_column: str, label_column: str, named: Collection[str]
) -> dict[str, Counter[str]]:
    """Counts the labels of every image; rows whose label is empty are left out, unless that label is named."""
    columns, rows = read_table(table)
    if repeated := [
        name for name, count in Counter(columns).items() if count > 1 and name in (id_column, label_column)
    ]:
        raise UserError(f"{table}: has two columns '{repeated[0]}'; rename one")
    for key, column in (("id_column", id_column), ("label_column", label_column)):
        require_known(column, columns, f"{table}: no column '{column}' ({key})")
    counts: dict[str, Counter[str]] = {}
    empty = []
    for number, row in enumerate(rows, 1):
        image, label = row[id_column].strip(), _without_decimals(row[label_column].strip())
        if not image or (label.lower() in _NO_LABEL and label not in named):
            empty.append(number)
        else:
            counts.setdefault(image, Counter())[label] += 1
    if empty:
        warnings.warn(
            f"{table}: {len(empty)} of {len(rows)} rows have no '{label_column}' or no '{id_column}' and are left out,"
            f" first row {empty[0]}",
            stacklevel=3,
        )
    return counts


def _without_decimals(label: str) -> str:
    """Returns a label without the decimals that pandas gives to whole numbers in a column with gaps: 0 for 0.0."""
    return re.sub(r"^(-?\d+)\.0+$", r"\1", label)


def _paths(
    images: Collection[str], root: Path, folder: Path, table: Path, listed: Collection[str]
) -> dict[str, Path]:
    """Returns the file of every image in the table, and warns of files that the table does not list."""
    files = images_in(folder)
    names = file_names(files, root, folder)
    file_of = {image: _file(image, names, table) for image in listed}
    paths = {image: path for image in images if (path := file_of[image]) is not None}
    if missing := [image for image in images if image not in paths]:
        raise UserError(
            f"{table}: no image '{missing[0]}' in {folder} ({len(missing)} of {len(images)} missing);"
            " add them, or remove their rows"
        )
    listed_files = set(file_of.values())
    if unlisted := [path for path in files if path not in listed_files]:
        warnings.warn(
            f"{table}: {len(unlisted)} of {len(files)} images have no labelled row and are left out, first"
            f" {unlisted[0]}",
            stacklevel=3,
        )
    ids: dict[Path, str] = {}
    for image, path in paths.items():
        if (other := ids.setdefault(path, image)) != image:
            raise UserError(f"{table}: '{other}' and '{image}' both are {path}; write each image in one way")
    return paths


def matches(ids: Sequence[str], names: FileNames, root: Path) -> bool:
    """Tells whether at least nine of ten words name files of a set in ``root``; ``names`` is from `file_names`."""
    try:
        fitting = sum(_file(word.strip(), names, root) is not None for word in ids)
    except UserError:
        return False
    return bool(ids) and 10 * fitting >= 9 * len(ids)


def label_column(
    file: Path, columns: Sequence[str], rows: Sequence[Mapping[str, str]]
) -> tuple[str, list[str]]:
    """Finds the column of a table that says which images are normal, and its values that say so.

    Columns with a usual name come first, then those that say it in words, then those of 0 and 1, which may as well be
    a sex. Of columns that rank the same, that of the fewest values is taken.

    Args:
        file: The table, for messages.
        columns: Names of its columns.
        rows: Cells by column.

    Raises:
        UserError: No column says so, or several may.
    """
    candidates: dict[tuple[int, int], dict[str, list[str]]] = {}
    for column in columns:
        values = {row[column].strip() for row in rows} - {""}
        normal_values = ONE if says_normal(column) else ZERO  # a column "good" says 1 of normal images
        named_normal = sorted(value for value in values if bare(value) in NORMAL)
        few_values = values if len(values) <= _MOST_CLASSES else ()
        if normal := named_normal or sorted(value for value in few_values if value.lower() in normal_values):
            rank = [*LABELS, column.lower()].index(column.lower())
            is_number = rank == len(LABELS) and not named_normal and normal_values is ZERO
            candidates.setdefault((rank + is_number, len(values)), {})[column] = normal
    likeliest = candidates[min(candidates)] if candidates else {}
    if len(likeliest) == 1:
        return next(iter(likeliest.items()))
    problem = f"no value of its columns {', '.join(columns) or '(none)'} is called as normal images are"
    if likeliest:
        problem = f"each of its columns {', '.join(likeliest)} may say which images are normal"
    raise UserError(f"{file}: {problem}; give data=labelled_csv data.label_column=... data.normal=[...]")


def file_names(files: Sequence[Path], root: Path, folder: Path) -> FileNames:
    """Lists what files may be called, most exact first: paths, name, both without suffix, number without leading zeros.

    Args:
        files: The files.
        root: The folder of the set.
        folder: The folder of its images, which holds all of them.
    """
    names: FileNames = [{} for _ in range(7)]
    for path in files:
        from_root, relative = path.relative_to(root).as_posix(), path.relative_to(folder)
        number = str(int(path.stem)) if path.stem.isdecimal() else path.stem
        absolute = os.path.abspath(path)  # noqa: PTH100, for it keeps links as they are written
        words = (
            absolute,
            from_root,
            relative.as_posix(),
            path.name,
            relative.with_suffix("").as_posix(),
            path.stem,
            number,
        )
        for kind, word in zip(names, words, strict=True):
            kind.setdefault(normalize("NFC", word), []).append(path)
    return names


def _file(image: str, names: FileNames, table: Path) -> Path | None:
    """Returns the file that an id names; None if no file has that name."""
    image = normalize("NFC", image.replace("\\", "/").removeprefix("./"))
    suffix = Path(image).suffix
    stem = image.removesuffix(suffix) if suffix.lower() in (*image_suffixes(), *DICOM_SUFFIXES) else image
    number = str(int(stem)) if stem.isdecimal() else stem
    for kind, word in zip(names, (*[image] * 4, stem, stem, number), strict=True):
        paths = kind.get(word, ())
        if len(paths) > 1:
            raise UserError(
                f"{table}: '{image}' may be {paths[0]} or {paths[1]}; write it with folder and suffix"
            )
        if paths:
            return paths[0]
    return None
