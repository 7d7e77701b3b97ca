"""Files beside images that may say which are normal and are not read: without them defects would count as normal."""

import re
from contextlib import suppress
from itertools import islice
from pathlib import Path

from lit_fedad.core.errors import UserError
from lit_fedad.data.image_files import NO_IMAGE, LeftOut, entries, find_images

TABLES = (".csv", ".tsv")
"""Suffixes of tables that are read."""

_SPREADSHEETS = (".xlsx", ".xls", ".ods", ".parquet")
_TEXTS = (".txt", ".json", ".jsonl", ".ndjson", ".xml", ".yaml", ".yml")
_MOST_TEXT = 1 << 20  # characters of a text that are looked at


def refuse_foreign(root: Path) -> None:
    """Refuses annotations of other formats, without which images with defects would count as normal.

    Args:
        root: The folder.

    Raises:
        UserError: There is one.
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
        UserError: There is one.
    """
    if tables := [path for path in entries(root) if path.suffix.lower() in (*TABLES, *_SPREADSHEETS)]:
        said, advice = "names no images", "correct it"
        if tables[0].suffix.lower() in _SPREADSHEETS:
            said, advice = "is not read", "save it as CSV in UTF-8"
        raise UserError(
            f"{tables[0]}: {said}, and without it all would count as normal; {advice}, or move it away"
        )


def refuse_texts(root: Path) -> None:
    """Refuses a text that is called like an image or names one, where nothing else says which images are normal.

    Args:
        root: The folder.

    Raises:
        UserError: There is one.
    """
    left_out = LeftOut()
    images = find_images(root, left_out)
    names, stems = {path.name for path in images}, {path.stem for path in images}
    for file in left_out.by_reason.get(NO_IMAGE, ()):
        if file.suffix.lower() not in _TEXTS:
            continue
        words: list[str] = []
        with suppress(OSError), file.open(encoding="utf-8", errors="replace") as text:
            words = re.split(r"[\s\"'/\\,:;<>=|]+", text.read(_MOST_TEXT))
        if file.stem in stems | names or not names.isdisjoint(words):
            raise UserError(
                f"{file}: may say which images are normal, but is not read, and without it all would count as normal;"
                " write labels into a CSV file, sort the images into folders, or move it away"
            )
