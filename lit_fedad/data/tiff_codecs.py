"""What Pillow lacks, of TIFF above all: files of too many pieces, those that it shows wrong, other compressions."""

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
_RAW = frozenset({33422, 50706, 50752})  # tags: colour filter, DNG, Canon
_BITS, _PLANES, _SAMPLE_FORMAT = 258, 284, 339
_SEPARATE, _SIGNED = 2, 2
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
    pieces = [0]
    with suppress(Exception):  # damage has many kinds: Pillow refuses it in one line
        pages = islice(_directories(file), _MOST_PAGES + 1)
        pieces.extend(max(len(tags.get(tag, ())) for tag in _PIECES) for tags in pages)
    file.seek(0)
    if max(pieces) > _MOST_PIECES or len(pieces) > _MOST_PAGES + 1:
        raise ValueError(
            f"has more than {_MOST_PAGES} pages, or a page in more than {_MOST_PIECES} pieces; save it anew"
        )


def refuse_misread(image: Any) -> None:
    """Refuses an opened file whose header says that its pixels would come out wrong.

    Raises:
        ValueError: It is of such a kind; the words say how to save it.
    """
    tags = getattr(image, "tag_v2", {})
    if _RAW.intersection(tags):
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
        head = file_bytes(image, 30)  # of a palette of black and white Pillow reads one bit a pixel
        if (bits := head[24 if head[14] == 12 else 28]) != 1:
            raise ValueError(f"is BMP of two colours with {bits} bits a pixel; save it as PNG")


def file_bytes(image: Any, most: int = -1) -> bytes:
    """Returns the bytes of an opened file from its beginning, as many as are asked for."""
    position = image.fp.tell()
    image.fp.seek(0)
    content: bytes = image.fp.read(most)
    image.fp.seek(position)
    return content


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
