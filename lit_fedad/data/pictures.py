"""Decoding of image files: the content tells the format, and a file is read right or refused in one line.

Suffixes only say which files of a folder are meant as images ([`folders.py`](folders.py)).
"""

import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from io import BytesIO
from itertools import count, islice
from pathlib import Path
from typing import IO, Any

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from lit_fedad.core.errors import UserError, one_line
from lit_fedad.core.files import check_regular
from lit_fedad.data.dicom import FLAT, read_dicom, read_native_dicom
from lit_fedad.data.input_files import check_pixels, chosen_page
from lit_fedad.data.sample import DICOM_SUFFIXES
from lit_fedad.data.tiff_codecs import (
    NO_PICTURE,
    check_pieces,
    file_bytes,
    other_compression,
    refuse_misread,
    uncompressed,
)

FORMATS = ("PNG", "JPEG", "MPO", "TIFF", "WEBP", "BMP", "DIB", "GIF", "PPM", "JPEG2000", "AVIF", "QOI")
"""Pillow's decoders that are used, all of formats that begin with bytes of their own; DICOM is read by pydicom."""

_MAGIC: dict[str, tuple[tuple[int, bytes], ...]] = {
    "PNG": ((0, b"\x89PNG\r\n\x1a\n"),),
    "JPEG": ((0, b"\xff\xd8\xff"),),
    "TIFF": tuple((0, word) for word in (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")),
    "WEBP": ((8, b"WEBP"),),
    "GIF": ((0, b"GIF87a"), (0, b"GIF89a")),
    "BMP": ((0, b"BM"),),
    "PPM": tuple((0, b"P%d%c" % (kind, blank)) for kind in range(1, 7) for blank in b"\n \t\r"),
    "JPEG2000": ((0, b"\xff\x4f\xff\x51"), (4, b"jP  \r\n\x87\n")),
    "AVIF": ((4, b"ftypavif"), (4, b"ftypavis")),
    "QOI": ((0, b"qoif"),),
}
_FOREIGN = {
    b"": "is empty",
    b"version https://git-lfs": "is a pointer of Git LFS; fetch the file itself (git lfs pull)",
    b"%PDF": "is a PDF",
    b"8BPS": "is a Photoshop file",
    b"\xff\x0a": "is JPEG XL",
    b"\0\0\0\x0cJXL ": "is JPEG XL",
    b"v/1\x01": "is OpenEXR",
    b"<": "is text, a web page or SVG",
}
"""First bytes of files that are often taken for images -> what such a file is."""
_BITS, _PHOTOMETRIC, _SUBFILE, _ORIENTATION = 258, 262, 254, 274  # tags of TIFF
_SIZE = (256, 257)
_HEAD = 132  # number of first bytes that tell the format
_MAX_SCANS = 500  # of a JPEG file, with those of small pictures in it; a progressive one has ten
_DARK = 16383  # the highest value of 14 bits
_DARK_WORDS = (
    "has images of 16 bits that are nearly black or dark, with no value above 16383 of 65535; if they hold 8 to 14"
    " bits, save them with 8, or scaled to 16"
)
_FLAT_WORDS = (
    "has DICOM images without a window that use less than a quarter of the values of their stored bits, and come out"
    " nearly flat; save them with a window (WindowCenter, WindowWidth)"
)
_warned: set[str] = set()


@dataclass(frozen=True)
class Picture:
    """A decoded image file, upright.

    Attributes:
        image: In the file's own mode; its palette and transparency are as in the file.
        full: Value of the brightest pixel that the file could hold.
        lossy: Whether its coding changes values near edges.
        turned: Whether EXIF turns or mirrors what the file stores.
        cut: Whether decoding cut its 16 bits to eight.
    """

    image: Image.Image
    full: int = 255
    lossy: bool = False
    turned: bool = False
    cut: bool = False


@cache
def decoders() -> tuple[str, ...]:
    """Lists the formats of `FORMATS` that the installed Pillow has."""
    Image.init()
    return tuple(name for name in FORMATS if name in Image.OPEN)


def sniff(source: Path | bytes) -> str | None:
    """Tells the format of a file by its first bytes: one of `FORMATS`, or DICOM; None where it is no picture.

    Args:
        source: The file, or its content.

    Raises:
        OSError: The file cannot be read.
    """
    if isinstance(source, Path):
        with source.open("rb") as file:
            return _sniff(file.read(_HEAD), source)
    return _sniff(source[:_HEAD])


def _sniff(head: bytes, path: Path | None = None) -> str | None:
    """Tells the format of a file by its first bytes, and by the suffix of its path where it has one."""
    if head[128:] == b"DICM":
        return "DICOM"
    for form, signatures in _MAGIC.items():
        if any(head[start : start + len(word)] == word for start, word in signatures):
            return form
    # Old files lack the four letters.
    return "DICOM" if path is not None and path.suffix.lower() in DICOM_SUFFIXES else None


def open_picture(path: Path, page: int | None = None, alone: bool = False) -> Picture:
    """Decodes an image file.

    Args:
        path: The file; links are followed.
        page: Number of the page or frame, from 0, without reduced copies; None where the file must hold a single one.
        alone: Whether a file of a single page is read whatever ``page`` says, as is done for masks.

    Raises:
        UserError: It is missing, damaged, no image, of a kind that is not read, lacks the page, or holds several pages
            or frames of which none is chosen.
    """
    try:
        check_regular(path)
        # Given a path, Pillow would map turned TIFF files into memory by their upright size and shuffle the pixels.
        with path.open("rb") as file:
            if (form := _sniff(head := file.read(_HEAD), path)) == "DICOM":
                return Picture(read_dicom(path, page, alone))
            if form is None:
                raise ValueError(_foreign(head))
            if form == "TIFF" and other_compression(path) is not None:
                with _opened(uncompressed(path, page, alone), form, None) as image:
                    return replace(_decoded(image), lossy=True)  # these codings may be
            with _opened(file, form, page, alone) as image:
                return _decoded(image)
    except UserError:
        raise
    except FileNotFoundError:
        raise UserError(f"{path}: no such image file; was it moved?") from None
    # Pillow reports damage through exceptions of many kinds, a decompression bomb among them.
    except Exception as error:
        reason = one_line(error)
        raise UserError(
            f"{path}: cannot be read as an image ({reason}); replace the file or remove it"
        ) from error


def _opened(
    source: IO[bytes], form: str, page: int | None, alone: bool = False, max_pixels: int | None = None
) -> Image.Image:
    """Opens a file of a known format at a page; checks its size before anything is decoded."""
    if form == "TIFF":
        check_pieces(source)
    try:
        image = Image.open(source, formats=(form,))
    except Image.DecompressionBombError:  # Pillow's own limit
        max_pixels = Image.MAX_IMAGE_PIXELS if max_pixels is None else max_pixels
        raise OverflowError(f"far more pixels than the {max_pixels} that are read") from None
    except UnidentifiedImageError:
        raise ValueError(
            f"is {form} of a kind that is not read: damaged, or of float or many channels"
        ) from None
    check_pixels(*image.size, max_pixels)
    _seek_page(image, page, alone)
    check_pixels(*image.size, max_pixels)  # pages may differ in size
    return image


def _foreign(head: bytes) -> str:
    """Says what a file is that begins with ``head`` and has no known image format."""
    if head[4:8] == b"ftyp":
        return f"is HEIC or video ({head[8:12].decode('latin-1')}); save it as JPEG or PNG"
    matching = (words for start, words in _FOREIGN.items() if head.startswith(start) and (start or not head))
    return next(matching, "is of no format that is read")


def shown_size(path: Path, page: int | None = None) -> tuple[tuple[int, int], bool]:
    """Reads from an image file's header its upright width and height, and whether it is shown turned or mirrored.

    Args:
        path: The file.
        page: As for `open_picture`.

    Raises:
        UserError: As `open_picture`, where the header tells.
    """
    try:
        check_regular(path)
        if (form := sniff(path)) not in ("DICOM", None):
            with path.open("rb") as file, _opened(file, form, page) as image:
                tags = getattr(image, "tag_v2", {})
                width, height = (
                    int(tags.get(tag, side)) for tag, side in zip(_SIZE, image.size, strict=True)
                )
                orientation = 1 if _is_bare_png(image) else image.getexif().get(_ORIENTATION, 1)
                size = (height, width) if orientation in (5, 6, 7, 8) else (width, height)
                return size, orientation not in (0, 1)
    # Damage raises exceptions of many kinds: `open_picture` below refuses the same file in one line.
    except Exception:  # noqa: S110
        pass
    picture = open_picture(path, page)
    return picture.image.size, picture.turned


def _is_bare_png(image: Any) -> bool:
    """Tells whether no chunk of a PNG may turn it; Pillow would decode the pixels to see the chunks behind them."""
    if image.format != "PNG":
        return False
    position = image.fp.tell()
    image.fp.seek(8)
    try:
        while (head := image.fp.read(8)) and len(head) == 8 and head[4:] != b"IEND":
            if head[4:] in (b"eXIf", b"iTXt", b"tEXt", b"zTXt"):
                return False
            image.fp.seek(int.from_bytes(head[:4], "big") + 4, 1)
        return True
    finally:
        image.fp.seek(position)


def decode_upload(content: bytes, form: str, most_pixels: int | None, page: int | None = None) -> Picture:
    """Decodes an uploaded image; its size is checked before memory is taken for its pixels.

    Args:
        content: The bytes of a file.
        form: One of `FORMATS`, or DICOM: the only decoder that is tried.
        most_pixels: Largest number of pixels; None for the limit of `check_pixels`.
        page: As for `open_picture`.

    Raises:
        OverflowError: It has more pixels.
        Exception: It cannot be decoded; decoders have exceptions of many kinds.
    """
    if form == "DICOM":
        return Picture(read_native_dicom(content, most_pixels, page))
    with _opened(BytesIO(content), form, page, max_pixels=most_pixels) as image:
        return _decoded(image)


def _decoded(image: Any) -> Picture:
    """Decodes the pixels of an opened file, and keeps what only its header says."""
    tags = getattr(image, "tag_v2", {})
    refuse_misread(image)
    bits = tags.get(_BITS, (8,))[0]
    stored = str(image.tile[0][3]) if image.tile else ""
    cut = (";16" in stored or "65535" in stored) and image.mode in ("RGB", "RGBA", "LA", "CMYK")
    if stored in ("L;2", "L;4") and "transparency" in image.info:  # Pillow scales all values but this
        image.info["transparency"] *= 85 if stored == "L;2" else 17
    # Pillow would compare the transparent value, of 16 bits, with pixels that were cut to eight.
    if "transparency" in image.info and (cut or image.mode.startswith("I;16")):
        raise ValueError(
            "one value of its 16 bits is transparent; save it with 8 bits or without transparency"
        )
    negative = tags.get(_PHOTOMETRIC) == 0 and image.mode.startswith(("I;16", "F"))
    if image.format in ("JPEG", "MPO") and file_bytes(image).count(b"\xff\xda") > _MAX_SCANS:
        raise ValueError(f"is drawn in more than {_MAX_SCANS} scans, each over all pixels; save it anew")
    lossy, turned = _lossy(image), image.getexif().get(_ORIENTATION, 1) not in (0, 1)
    image.load()
    upright = ImageOps.exif_transpose(image)
    if upright.mode == "La":  # grey multiplied by its opacity: Pillow converts it to no other mode
        upright = upright.convert("LA")
    full = 65535 if upright.mode.startswith(("I", "F")) else 255
    if upright.mode.startswith("I;16") and 8 < bits < 16:
        full = 2**bits - 1
    if negative:  # Pillow inverts white-is-zero files only up to eight bits
        if upright.mode == "F":
            raise ValueError("its white is zero, and its values are float; save it with 8 or 16 bits")
        upright = Image.fromarray((full - np.asarray(upright).astype(np.uint16)).astype(np.uint16))
    return Picture(upright, full, lossy, turned, cut)


def _seek_page(image: Any, page: int | None, alone: bool) -> None:
    """Moves an opened file to the chosen page or frame; without a choice it must hold a single one."""
    pages = list(islice(_pages(image), 2 if page is None else max(page + 1, 2)))
    position = pages[chosen_page(len(pages), page, alone)]
    try:
        image.seek(position)
    except EOFError:
        chosen_page(position, page)  # raises: except for TIFF, `_pages` may give pages that do not exist


def _pages(image: Any) -> Iterator[int]:
    """Yields the positions of an opened file's pages or frames; except for TIFF perhaps more than there are."""
    if image.format == "MPO":  # a picture and its preview, as cameras write them, or several views
        entries = image.mpinfo.get(0xB002, ())
        several = any("Multi-Frame" in str(entry["Attribute"]["MPType"]) for entry in entries[1:])
    else:
        several = getattr(image, "is_animated", False)
    for position in count() if several else range(1):
        if image.format == "TIFF":
            try:
                image.seek(position)
            except EOFError:
                return
            if int(image.tag_v2.get(_SUBFILE, 0)) & NO_PICTURE:
                if position == 0:
                    raise ValueError(
                        "its first page is a small copy of a picture in another form; convert it first"
                    )
                continue
        yield position


def _lossy(image: Any) -> bool:
    """Tells whether the coding of an opened file smears edges."""
    if image.format == "TIFF":
        return image.info.get("compression") in ("jpeg", "tiff_jpeg", "webp")
    if image.format == "WEBP":
        head = file_bytes(image, 65536)
        return b"VP8L" not in head[:64] and b"VP8 " in head
    return image.format in ("JPEG", "MPO", "JPEG2000", "AVIF")


def to_rgb(picture: Picture, path: Path) -> Image.Image:
    """Converts a picture to eight-bit RGB: transparent pixels become white, sixteen bits are scaled to eight.

    Args:
        picture: The picture.
        path: Its file, for messages.

    Raises:
        UserError: Its pixels have no fixed range, or all are transparent.
    """
    image = picture.image
    if image.mode == "F" or image.mode.startswith("I"):
        values = np.asarray(image)
        # Pillow opens some 16-bit files with 32-bit pixels, so the values decide.
        if image.mode == "F" or (image.mode == "I" and not 0 <= values.min() <= values.max() <= picture.full):
            raise UserError(
                f"{path}: its pixels are float or 32-bit, of no fixed range; save it with 8 or 16 bits"
            )
        image = Image.fromarray(_eight_bit_table(picture.full)[values])
    if image.has_transparency_data:
        image = image.convert("RGBA")
        if image.getchannel("A").getextrema()[1] == 0:
            raise UserError(f"{path}: all its pixels are transparent; save it without transparency")
        background = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(background, image)
    return image.convert("RGB")


@cache
def _eight_bit_table(full: int) -> np.ndarray:
    """Returns a table that scales values from 0 to ``full`` to eight bits, rounded, uint8 [full + 1]."""
    return ((np.arange(full + 1, dtype=np.int64) * 255 + full // 2) // full).astype(np.uint8)


def caution(picture: Picture) -> str | None:
    """Says what may be wrong with a picture that can be read; None for nothing."""
    image = picture.image
    if FLAT in image.info:
        return _FLAT_WORDS
    if picture.full == 65535 and image.mode.startswith("I"):
        brightest, lowest = int(np.asarray(image).max()), 1
    elif picture.cut:
        bands: list[Any] = list(image.getextrema())
        colours = bands[:-1] if "A" in image.mode else bands
        # Lowest 0, because values of eight bits became 0 when they were cut.
        brightest, lowest = max(high for _, high in colours) << 8, 0
    else:
        return None
    return _DARK_WORDS if lowest <= brightest <= _DARK else None


def read_picture(path: Path, page: int | None = None) -> Image.Image:
    """Reads an image file as eight-bit RGB, upright.

    Args:
        path: The file.
        page: As for `open_picture`.

    Raises:
        UserError: As `open_picture` and `to_rgb`.
    """
    picture = open_picture(path, page)
    if words := caution(picture):
        warn_once(f"{Path(path).parent}: {words}")
    return to_rgb(picture, path)


def warn_once(text: str) -> None:
    """Warns of something once in a process, whoever reads the file."""
    if text not in _warned:
        _warned.add(text)
        warnings.warn(text, stacklevel=3)
