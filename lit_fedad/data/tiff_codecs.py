"""What Pillow lacks for TIFF and BMP: limits on pieces, refusal of what it would show wrong, more compressions."""

from collections.abc import Iterator
from contextlib import suppress
from io import BytesIO
from itertools import islice
from pathlib import Path
from typing import IO, Any

from PIL import TiffImagePlugin

from lit_fedad.core.extras import require
from lit_fedad.data.input_files import check_pixels, chosen_page

NO_PICTURE = 1 | 4
"""Kinds of a TIFF's pages (tag 254) that are no pictures of their own: a reduced copy, a transparency mask."""

_COMPRESSION, _ORIENTATION = 259, 274
_RAW_TAGS = frozenset({33422, 50706, 50752})  # tags of camera files: colour filter, DNG, Canon
_BITS, _PLANES, _SAMPLE_FORMAT = 258, 284, 339
_SEPARATE, _SIGNED = 2, 2
_PIECE_TAGS = (273, 324)  # tags: offsets of strips, of tiles
_MAX_PAGES, _MAX_PIECES = 10_000, 100_000
_PILLOW_COMPRESSIONS = frozenset(
    {1, 2, 3, 4, 5, 6, 7, 8, 32771, 32773, 32809, 32946, 34676, 34677, 34925, 50000}
)


def _directories(file: IO[bytes]) -> Iterator[TiffImagePlugin.ImageFileDirectory_v2]:
    """Yields the tags of a file's pages, one after the other, in the same object."""
    head = file.read(8)
    tags = TiffImagePlugin.ImageFileDirectory_v2(head + (file.read(8) if b"+" in head[2:4] else b""))
    visited: set[int] = set()
    while tags.next and tags.next not in visited:
        visited.add(tags.next)
        file.seek(tags.next)
        tags.load(file)
        yield tags


def check_pieces(file: IO[bytes]) -> None:
    """Refuses a TIFF file of more pages or pieces than pictures have: Pillow makes an object for each on opening.

    Raises:
        ValueError: The file has more.
    """
    pieces = [0]
    with suppress(Exception):  # damage raises exceptions of many kinds: Pillow refuses the file later
        pages = islice(_directories(file), _MAX_PAGES + 1)
        pieces.extend(max(len(tags.get(tag, ())) for tag in _PIECE_TAGS) for tags in pages)
    file.seek(0)
    if max(pieces) > _MAX_PIECES or len(pieces) > _MAX_PAGES + 1:
        raise ValueError(
            f"has more than {_MAX_PAGES} pages, or a page in more than {_MAX_PIECES} pieces; save it anew"
        )


def refuse_misread(image: Any) -> None:
    """Refuses an opened file whose header says that its pixels would come out wrong.

    Raises:
        ValueError: The file is of such a kind; the message says how to save it.
    """
    tags = getattr(image, "tag_v2", {})
    if _RAW_TAGS.intersection(tags):
        raise ValueError("is a camera's raw file, whose picture must be developed; convert it first")
    bits = tags.get(_BITS, (8,))[0]
    if _SIGNED in tags.get(_SAMPLE_FORMAT, ()) and bits <= 16:
        raise ValueError(
            f"its {bits}-bit values are signed, of no fixed white; save it with unsigned 8 or 16 bits"
        )
    # Pillow takes each plane for one of eight bits; libtiff, which reads compressed ones, does not.
    if tags.get(_PLANES) == _SEPARATE and bits > 8 and image.tile and image.tile[0][0] == "raw":
        raise ValueError(
            f"its colours of {bits} bits lie in one plane after the other; save it with interleaved colours"
        )
    if image.format == "BMP" and image.mode == "1":
        head = file_bytes(image, 30)  # with a palette of black and white, Pillow reads one bit a pixel
        if (bits := head[24 if head[14] == 12 else 28]) != 1:
            raise ValueError(f"is BMP of two colours with {bits} bits a pixel; save it as PNG")


def file_bytes(image: Any, max_bytes: int = -1) -> bytes:
    """Returns at most ``max_bytes`` first bytes of an opened file; -1 for all."""
    position = image.fp.tell()
    image.fp.seek(0)
    content: bytes = image.fp.read(max_bytes)
    image.fp.seek(position)
    return content


def other_compression(path: Path) -> int | None:
    """Returns the number of a TIFF file's compression if Pillow lacks it; None otherwise.

    Args:
        path: A TIFF file.
    """
    with suppress(Exception), path.open("rb") as file:  # a damaged file is refused when it is opened
        number = int(next(_directories(file)).get(_COMPRESSION, 1))
        return None if number in _PILLOW_COMPRESSIONS else number
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
            candidate
            for number in range(len(file.pages))
            if not (candidate := file.pages[number].aspage()).subfiletype & NO_PICTURE
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
