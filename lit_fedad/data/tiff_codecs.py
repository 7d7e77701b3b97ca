"""TIFF files: how many pieces they may have, and pages in compressions that Pillow lacks, decoded by imagecodecs."""

from collections.abc import Iterator
from contextlib import suppress
from io import BytesIO
from itertools import islice
from pathlib import Path
from typing import IO

from PIL import TiffImagePlugin

from lit_fedad.core.extras import require
from lit_fedad.data.input_files import check_pixels, chosen_page

NO_PICTURE = 1 | 4
"""Kinds of a TIFF's pages (tag 254) that are no pictures of their own: a reduced copy, a transparency mask."""

_COMPRESSION, _ORIENTATION = 259, 274
_PIECES = (273, 324)  # places of strips, of tiles
_MOST_PAGES, _MOST_PIECES = 10_000, 100_000
_PILLOW = frozenset({1, 2, 3, 4, 5, 6, 7, 8, 32771, 32773, 32809, 32946, 34676, 34677, 34925, 50000})


def _directories(file: IO[bytes]) -> Iterator[TiffImagePlugin.ImageFileDirectory_v2]:
    """The tags of a file's pages, one after the other, in the same object."""
    head = file.read(8)
    tags = TiffImagePlugin.ImageFileDirectory_v2(head + (file.read(8) if b"+" in head[2:4] else b""))
    known: set[int] = set()
    while tags.next and tags.next not in known:
        known.add(tags.next)
        file.seek(tags.next)
        tags.load(file)
        yield tags


def check_pieces(file: IO[bytes]) -> None:
    """Refuses a TIFF file of more pages or pieces than pictures have: Pillow makes objects of each before all else.

    Raises:
        ValueError: It has more.
    """
    found = [0]
    with suppress(Exception):  # damage has many kinds: Pillow refuses it in one line
        pages = islice(_directories(file), _MOST_PAGES + 1)
        found.extend(max(len(tags.get(tag, ())) for tag in _PIECES) for tags in pages)
    file.seek(0)
    if max(found) > _MOST_PIECES or len(found) > _MOST_PAGES + 1:
        raise ValueError(
            f"has more than {_MOST_PAGES} pages, or a page in more than {_MOST_PIECES} pieces; save it anew"
        )


def other_compression(path: Path) -> int | None:
    """Returns TIFF's number of the compression of a file that Pillow lacks; None where it does not.

    Args:
        path: A TIFF file.
    """
    with suppress(Exception), path.open("rb") as file:  # as above
        number = int(next(_directories(file)).get(_COMPRESSION, 1))
        return None if number in _PILLOW else number
    return None


def uncompressed(path: Path, page: int | None, alone: bool) -> BytesIO:
    """Decodes a page of a TIFF file, and returns it as an uncompressed TIFF file of that page.

    Args:
        path: A file of `other_compression`.
        page: As for `lit_fedad.data.pictures.open_picture`.
        alone: Likewise.

    Raises:
        UserError: The extra ``codecs`` is missing.
        ValueError: The page is not there, or of a kind that is not read.
        OverflowError: It has more pixels than `check_pixels` lets pass.
        Exception: It cannot be decoded; decoders have exceptions of many kinds.
    """
    require("codecs", f"{path}: TIFF of compression {other_compression(path)}")
    import tifffile

    with tifffile.TiffFile(path) as file:
        pages = [
            one
            for number in range(len(file.pages))
            if not (one := file.pages[number].aspage()).subfiletype & NO_PICTURE
        ]
        chosen = pages[chosen_page(len(pages), page, alone)]
        check_pixels(chosen.imagewidth, chosen.imagelength)
        if (
            chosen.photometric > 2
            or chosen.axes not in ("YX", "YXS")
            or chosen.bitspersample not in (8, 16, 32)
        ):
            raise ValueError("is TIFF of a kind that is not read; save it as grey or RGB, with 8 or 16 bits")
        copy = BytesIO()
        tifffile.imwrite(
            copy,
            chosen.asarray(),
            photometric=chosen.photometric,
            extrasamples=chosen.extrasamples or None,
            extratags=[(_ORIENTATION, 3, 1, chosen.tags.valueof(_ORIENTATION, 1), True)],
            metadata=None,
        )
    copy.seek(0)
    return copy
