"""Images that arrive over HTTP: how large they may be, and how they are read."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from PIL import Image

from lit_fedad.core.errors import UserError, first_line
from lit_fedad.core.extras import install
from lit_fedad.data.pictures import caution, decode_upload, sniff, to_rgb

FORMATS = {
    "image/png": "PNG",
    "image/jpeg": "JPEG",
    "image/webp": "WEBP",
    "image/bmp": "BMP",
    "image/tiff": "TIFF",
    "application/dicom": "DICOM",
}
"""Format of each content type: Pillow's, or DICOM by pydicom. No other decoder ever sees an upload."""

_ALSO = {
    "image/jpg": "JPEG",
    "image/pjpeg": "JPEG",
    "image/x-png": "PNG",
    "image/x-ms-bmp": "BMP",
    "image/x-bmp": "BMP",
    "image/tif": "TIFF",
    "application/dicom+octet-stream": "DICOM",
}  # other names of the same types, as clients send them


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
        bytes: Largest upload.
        pixels: Largest image, width times height.
        patience: Longest time in seconds that an upload may take to arrive.
    """

    bytes: int = 20_000_000
    pixels: int = 25_000_000
    patience: float = 30.0


def image_format(content_type: str | None) -> str:
    """Finds the format of a content type.

    Args:
        content_type: Value of the request's header.

    Raises:
        RefusedError: 415, if it is no type of image that is read here, or DICOM without pydicom.

    Example:
        >>> image_format("image/png; charset=binary")
        'PNG'
    """
    named = (content_type or "").partition(";")[0].strip().lower()
    form = FORMATS.get(named) or _ALSO.get(named)
    if form is None:
        raise RefusedError(415, f"give a Content-Type of {', '.join(FORMATS)}")
    if form == "DICOM" and find_spec("pydicom") is None:
        raise RefusedError(415, f"DICOM is not read here: {install('dicom')}")
    return form


def read_upload(content: bytes, form: str, most_pixels: int) -> Image.Image:
    """Decodes an upload; its size is read from its header before any memory is taken for its pixels.

    Args:
        content: The bytes.
        form: A value of `FORMATS`, the only one that is tried.
        most_pixels: Largest width times height.

    Returns:
        The image in eight-bit RGB, upright; its ``info`` has nothing but ``caution``, what may be wrong with it.

    Raises:
        RefusedError: 413, if it has more pixels; 422, if it is no image of this format.
    """
    try:
        if sniff(content) != form:
            raise RefusedError(422, f"is no {form} file")
        picture = decode_upload(content, form, most_pixels)
        image = to_rgb(picture, Path("upload"))
        words = caution(picture)
        image.info = {"caution": words} if words else {}
        return image
    except RefusedError:
        raise
    except Image.DecompressionBombError:  # Pillow's own limit
        raise RefusedError(413, f"far more pixels than the {most_pixels} that are read") from None
    except OverflowError as error:
        raise RefusedError(413, str(error)) from error
    except UserError as error:
        raise RefusedError(422, str(error)) from error
    # Pillow and pydicom report damage through exceptions of many kinds.
    except Exception as error:
        raise RefusedError(422, f"cannot be read as {form} ({first_line(error)})") from error
