"""Files of other people, opened so that none of them hangs the program or fills its memory."""

from __future__ import annotations

import codecs
import csv
import io
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
from PIL import Image

from lit_fedad.core.errors import UserError, one_line
from lit_fedad.core.files import given_bytes, long_path_in_one_line

_MAX_BYTES = 1 << 31  # of a list of images or regions: those of COCO have 450 million bytes
_MAX_DEFLATE_RATIO = 1032  # unpacked by packed bytes, of the compression of .npz files


def read_json(path: Path) -> Any:
    """Reads a JSON file.

    Args:
        path: The file.

    Raises:
        UserError: It is missing, no regular file, too long, not JSON, or nested too deeply.
    """
    try:
        return json.loads(given_bytes(path, _MAX_BYTES).decode())
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; correct its name, or put it there") from None
    except (OSError, ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else one_line(error)
        raise UserError(f"{path}: cannot be read as JSON: {reason}; correct it, or get it anew") from error


def read_table(path: Path) -> tuple[list[str], list[dict[str, str]]]:
    """Reads a CSV file whose first line names its columns; empty lines may stand above it.

    Commas separate the cells, or semicolons or tabs where the first line has more of these, as spreadsheets write
    them. A line ``sep=;`` above it, which spreadsheets write too, names the separator.

    Args:
        path: The file, in UTF-8, or in UTF-16 that begins with its mark.

    Returns:
        Names of the columns, and the cells of each row by column; missing cells of a short row are empty.

    Raises:
        UserError: It is missing, in another coding, or a row has more cells than there are columns.
    """
    if not path.is_file():
        raise UserError(f"{path}: no such file; correct its name, or put it there")
    try:
        content = given_bytes(path, _MAX_BYTES)
        wide = content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
        text = content.decode("utf-16" if wide else "utf-8-sig").lstrip("\r\n")
        first, _, rest = text.partition("\n")
        separator = max(",;\t", key=first.count)
        if named := re.fullmatch(r"sep=(.)\r?", first):
            separator, text = named.group(1), rest
        reader = csv.DictReader(
            io.StringIO(text, newline=""),
            restval="",
            delimiter=separator,
            skipinitialspace=True,
            strict=True,
        )
        # HeadCT's header reads "id, hemorrhage".
        columns = reader.fieldnames = [name.strip() for name in reader.fieldnames or ()]
        rows = list(reader)
        for number, row in enumerate(rows, 1):
            if None in row:
                raise ValueError(f"row {number} has more fields than the header")
    except (OSError, ValueError, csv.Error) as error:
        reason = one_line(error)
        raise UserError(f"{path}: cannot be read as CSV: {reason}; save it as CSV in UTF-8") from error
    return columns, rows


def written_rows(path: Path, strict: bool = False) -> csv.DictReader[str]:
    """Reads a table that a command wrote, whose paths may be no UTF-8.

    Args:
        path: The file.
        strict: Whether a quote that is not closed is an error.

    Raises:
        UserError: It is no regular file, or too long.
        OSError: It cannot be read.
    """
    text = given_bytes(path).decode("utf-8-sig", "surrogateescape")  # a spreadsheet may have saved it again
    return csv.DictReader(io.StringIO(text, newline=""), strict=strict)


def inside(folder: Path, name: str, source: Path) -> Path:
    """Joins a folder and the name of a file in it that its set gives.

    Args:
        folder: The folder.
        name: The name.
        source: The file of the set that gives it.

    Raises:
        UserError: The name leads out of the folder.
    """
    if Path(name).is_absolute() or ".." in Path(name).parts:
        raise UserError(f"{source}: {name!r:.80} lies outside of the folder of images; unpack it again")
    return folder / name


def require_files(files: Sequence[Path], source: Path, advice: str) -> None:
    """Refuses files that are missing although a file of the set names them.

    Args:
        files: The images and masks.
        source: The file that names them.
        advice: What to do, for the message.

    Raises:
        UserError: One is missing, or its name is too long for a path.
    """
    with long_path_in_one_line():
        missing = [path for path in files if not path.is_file()]
    if missing:
        raise UserError(
            f"{source}: names {missing[0]}, which is not there ({len(missing)} of {len(files)} files missing); {advice}"
        )


def chosen_page(pages: int, page: int | None, alone: bool = False) -> int:
    """Returns the number, from 0, of the page or frame to read; a file of several needs a choice.

    Args:
        pages: Number of pages or frames in the file.
        page: The chosen one, from 0; None for no choice.
        alone: Whether a file of a single page is read whatever ``page`` says, as is done for masks.

    Raises:
        ValueError: The file holds several and none is chosen, or lacks the chosen one.

    Example:
        >>> chosen_page(1, None), chosen_page(3, 2), chosen_page(1, 2, alone=True)
        (0, 2, 0)
    """
    if pages == 1 and (page is None or alone):
        return 0
    if page is None:
        raise ValueError(
            "holds several pages or frames; save each as a file of its own, or choose one in training, by image.page"
            " (from 0)"
        )
    if page >= pages:
        raise ValueError(f"has no page {page}; image.page counts from 0")
    return page


def check_pixels(width: int, height: int, max_pixels: int | None = None) -> None:
    """Refuses an image of too many pixels, before memory is taken for it.

    Args:
        width: Its width in pixels.
        height: Its height in pixels.
        max_pixels: Largest number of pixels; None for ``PIL.Image.MAX_IMAGE_PIXELS``, which may be raised in Python.

    Raises:
        OverflowError: It has more pixels.
    """
    limit = Image.MAX_IMAGE_PIXELS if max_pixels is None else max_pixels
    if limit is not None and width * height > limit:
        raise OverflowError(f"{width}x{height} pixels, and at most {limit} are read")


def check_array(file: IO[bytes], size: int, packed: int) -> None:
    """Checks that an array has the bytes that its header claims, before any memory is taken for it.

    Args:
        file: An ``.npy`` stream at its start.
        size: Bytes of the stream, as its archive says.
        packed: Bytes of the compressed stream in the archive.

    Raises:
        ValueError: The header or the archive claims more than there can be.
    """
    if np.lib.format.read_magic(file) == (1, 0):
        shape, _, dtype = np.lib.format.read_array_header_1_0(file)
    else:
        shape, _, dtype = np.lib.format.read_array_header_2_0(file)
    claimed = dtype.itemsize
    for side in shape:
        claimed *= side  # Python's whole numbers do not overflow
    if claimed > size or size > _MAX_DEFLATE_RATIO * max(packed, 1):
        raise ValueError(f"claims {max(claimed, size)} bytes, and holds {packed}")
