"""Files that Pillow opens and would show wrong: they are refused before their pixels are decoded."""

from typing import Any

_RAW = frozenset({33422, 50706, 50752})  # tags of TIFF: colour filter, DNG, Canon
_BITS, _PLANES, _SAMPLE_FORMAT = 258, 284, 339
_SEPARATE, _SIGNED = 2, 2


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
