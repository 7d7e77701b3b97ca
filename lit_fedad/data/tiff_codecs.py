"""TIFF pages in compressions that Pillow lacks (JPEG 2000, JPEG XL, LERC and others), decoded by imagecodecs."""

from contextlib import suppress
from io import BytesIO
from pathlib import Path

from PIL import TiffImagePlugin

from lit_fedad.core.extras import require
from lit_fedad.data.input_files import check_pixels, chosen_page

NO_PICTURE = 1 | 4
"""Kinds of a TIFF's pages (tag 254) that are no pictures of their own: a reduced copy, a transparency mask."""

_COMPRESSION, _ORIENTATION = 259, 274
_PILLOW = frozenset({1, 2, 3, 4, 5, 6, 7, 8, 32771, 32773, 32809, 32946, 34676, 34677, 34925, 50000})


def other_compression(path: Path) -> int | None:
    """Returns TIFF's number of the compression of a file that Pillow lacks; None where it does not.

    Args:
        path: A TIFF file.
    """
    with suppress(Exception), path.open("rb") as file:  # damage has many kinds: Pillow refuses it in one line
        head = file.read(8)
        tags = TiffImagePlugin.ImageFileDirectory_v2(head + (file.read(8) if b"+" in head[2:4] else b""))
        file.seek(tags.next)
        tags.load(file)
        number = int(tags.get(_COMPRESSION, 1))
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
