"""Images that arrive over HTTP: how large they may be, and how they are read."""

from __future__ import annotations

from dataclasses import dataclass
from email.message import Message
from importlib.util import find_spec
from pathlib import Path

from PIL import Image

from lit_fedad.core.errors import UserError, first_line
from lit_fedad.core.extras import install
from lit_fedad.data.pictures import caution, decode_upload, sniff, to_rgb

FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "TIFF", "DICOM")
"""Formats that are read: Pillow's, and DICOM by pydicom. No other decoder ever sees an upload."""


_MAX_PARTS = 100
"""Parts of a form that are looked at: a short boundary between them may occur millions of times in an upload."""


class RefusedError(Exception):
    """A request that is not answered with a score.

    Args:
        status: HTTP status.
        reason: One line for whoever sent it.
    """

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status
        self.reason = reason


@dataclass(frozen=True)
class Limits:
    """What one request may cost.

    Attributes:
        max_bytes: Largest upload.
        max_pixels: Largest image, width times height.
        patience: Longest time in seconds that an upload may take to arrive.
    """

    max_bytes: int = 20_000_000
    max_pixels: int = 25_000_000
    patience: float = 30.0


def image_format(content: bytes) -> str:
    """Finds the format of an upload by its first bytes, whatever its sender calls it.

    Args:
        content: The bytes.

    Raises:
        RefusedError: 415, if it is none of `FORMATS`, or DICOM without pydicom.
    """
    form = sniff(content)
    if form not in FORMATS:
        raise RefusedError(415, f"is no image of a format that is read here: {', '.join(FORMATS)}")
    if form == "DICOM" and find_spec("pydicom") is None:
        raise RefusedError(415, f"DICOM is not read here: {install('dicom')}")
    return form


def file_in(content: bytes, content_type: str) -> bytes:
    r"""Takes the file out of a body: the first file of a form (``multipart/form-data``), or the body itself.

    Args:
        content: The body.
        content_type: Value of the request's header.

    Raises:
        RefusedError: 422, if a form holds no file, or the header cannot be read.

    Example:
        >>> form = b'--x\r\nContent-Disposition: form-data; name="f"; filename="a"\r\n\r\nBM\r\n--x--'
        >>> file_in(form, "multipart/form-data; boundary=x"), file_in(b"BM", "image/bmp")
        (b'BM', b'BM')
    """
    header = Message()
    header["Content-Type"] = content_type
    try:
        boundary = (header.get_boundary() or "").encode()
    except (TypeError, UnicodeError) as error:  # its parameter is split wrongly, or has an unknown coding
        raise RefusedError(422, "its Content-Type cannot be read") from error
    if header.get_content_type() != "multipart/form-data" or not boundary:
        return content
    for part in content.split(b"--" + boundary, _MAX_PARTS + 1)[1 : _MAX_PARTS + 1]:
        head, _, body = part.partition(b"\r\n\r\n")
        if b"filename" in head.lower():
            return body.removesuffix(b"\r\n")
    raise RefusedError(422, "the form holds no file: curl -F file=@IMAGE.png")


def read_upload(content: bytes, most_pixels: int, page: int | None = None) -> Image.Image:
    """Decodes an upload; its size is read from its header before any memory is taken for its pixels.

    Args:
        content: The bytes.
        most_pixels: Largest width times height.
        page: Page or frame that is read, from 0; None where the upload must hold a single one.

    Returns:
        The image in eight-bit RGB, upright; its ``info`` has nothing but ``caution``, what may be wrong with it.

    Raises:
        RefusedError: 413, if it has more pixels; 415, as `image_format`; 422, if it is no image of its format.
    """
    form = image_format(content)
    try:
        picture = decode_upload(content, form, most_pixels, page)
        image = to_rgb(picture, Path("upload"))
        words = caution(picture)
        image.info = {"caution": words} if words else {}
        return image
    except OverflowError as error:
        raise RefusedError(413, str(error)) from error
    except UserError as error:
        raise RefusedError(422, str(error)) from error
    # Pillow and pydicom report damage through exceptions of many kinds.
    except Exception as error:
        raise RefusedError(422, f"cannot be read as {form} ({first_line(error)})") from error
