"""What `data=auto` looks for before it takes a folder for images alone: files that say how it must be read.

Public sets are told by files that only they have; a general reader would misread them. Files of labels that are not
read are refused, for without them images with defects would count as normal.
"""

import re
from contextlib import suppress
from itertools import islice
from pathlib import Path

from lit_fedad.core.errors import UserError
from lit_fedad.data.image_files import NO_IMAGE, LeftOut, entries, find_images
from lit_fedad.data.input_files import read_json

_SETS = {
    "split_csv/1cls.csv": ("VisA with its split files", "visa"),
    "*/train/_annotations.coco.json": ("sets of VISION, with COCO annotations", "vision"),
    "train/*_GT.png": ("KolektorSDD2, whose masks say which images are normal", "kolektor_sdd2"),
    "realiad_jsons/realiad_jsons/*.json": ("Real-IAD with its split files", "real_iad"),
    "data.json": ("a set of MedIAnomaly with its split", "medianomaly"),
}
"""Pattern of files in the folder of a set -> a description of the set, and the data configuration that reads it."""

_PRODUCTS = {
    "defects_config.json": ("MVTec LOCO AD", "mvtec_loco", "of its products"),
    "test_public/ground_truth": ("MVTec AD 2", "mvtec_ad2", "of its products"),
    "test/Ungood/label": ("BMAD, with masks", "bmad", "of its sets"),
    "Data/Images/Normal": ("VisA", "visa", "with split_csv in it"),
    "NG/*/S[0-9][0-9][0-9][0-9]": ("Real-IAD", "real_iad", "of its images and split files"),
}
"""Pattern of files in the folder of a product -> the set, its data configuration, and what its ``data.root`` holds."""

TABLES = (".csv", ".tsv")
"""Suffixes of tables that are read."""

_SPREADSHEETS = (".xlsx", ".xls", ".ods", ".parquet")
_TEXTS = (".txt", ".json", ".jsonl", ".ndjson", ".xml", ".yaml", ".yml")
_MAX_TEXT = 1 << 20  # characters of a text file that are searched


def published_set(root: Path) -> tuple[str, str] | None:
    """Recognises a public set by the files in its folder.

    Args:
        root: The folder.

    Returns:
        A description of the set, and the data configuration that reads it; None where it is none of these sets.

    Raises:
        UserError: It is a set, or a product of one, that another data configuration reads; the line names it.
    """
    for pattern, seen_and_data in _SETS.items():
        if any(map(_marks_a_set, root.glob(pattern))):
            return seen_and_data
    for pattern, (title, name, folder) in _PRODUCTS.items():
        if any(next(root.glob(f"{level}{pattern}"), None) for level in ("", "*/", "*/*/", "*/*/*/")):
            raise UserError(
                f"{root}: is {title}, in a layout of its own; give data={name}, and the folder {folder} as data.root"
            )
    return None


def _marks_a_set(path: Path) -> bool:
    """Tells whether a file marks a set; a ``data.json`` must have the keys of MedIAnomaly."""
    if path.name != "data.json":
        return True
    try:
        content = read_json(path)
        return isinstance(content["train"]["0"], list) and {"0", "1"} <= content["test"].keys()
    except (KeyError, TypeError, AttributeError, UserError):
        return False


def refuse_foreign(root: Path) -> None:
    """Refuses annotations of other formats, without which images with defects would count as normal.

    Args:
        root: The folder.

    Raises:
        UserError: There is such a file.
    """
    forms = (
        ("YOLO", b"", ("labels/*.txt", "labels/*/*.txt", "*/labels/*.txt")),
        ("Pascal VOC", b"<annotation", ("*.xml", "*/*.xml")),
        ("LabelMe", b'"shapes"', ("*.json", "*/*.json")),
    )
    for form, mark, patterns in forms:
        for file in (file for pattern in patterns for file in islice(root.glob(pattern), 10)):
            if file.is_file() and mark in file.read_bytes()[:1000]:
                raise UserError(
                    f"{file}: annotations of {form} are not read, and without them all images would count as normal;"
                    " convert them to COCO, or sort the images into folders and move them away"
                )


def refuse_tables(root: Path) -> None:
    """Refuses a table that names no image, or is not read, where nothing else says which images are normal.

    Args:
        root: The folder.

    Raises:
        UserError: There is such a file.
    """
    if tables := [path for path in entries(root) if path.suffix.lower() in (*TABLES, *_SPREADSHEETS)]:
        problem, advice = "names no images", "correct it"
        if tables[0].suffix.lower() in _SPREADSHEETS:
            problem, advice = "is not read", "save it as CSV in UTF-8"
        raise UserError(
            f"{tables[0]}: {problem}, and without it all would count as normal; {advice}, or move it away"
        )


def refuse_texts(root: Path) -> None:
    """Refuses a text that is called like an image or names one, where nothing else says which images are normal.

    Args:
        root: The folder.

    Raises:
        UserError: There is such a file.
    """
    left_out = LeftOut()
    images = find_images(root, left_out)
    names, stems = {path.name for path in images}, {path.stem for path in images}
    for file in left_out.by_reason.get(NO_IMAGE, ()):
        if file.suffix.lower() not in _TEXTS:
            continue
        words: list[str] = []
        with suppress(OSError), file.open(encoding="utf-8", errors="replace") as text:
            words = re.split(r"[\s\"'/\\,:;<>=|]+", text.read(_MAX_TEXT))
        if file.stem in stems | names or not names.isdisjoint(words):
            raise UserError(
                f"{file}: may say which images are normal, but is not read, and without it all would count as normal;"
                " write labels into a CSV file, sort the images into folders, or move it away"
            )
