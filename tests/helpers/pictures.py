"""One picture as many files: by format, mode, depth, orientation and page. All of them hold its very pixels."""

from __future__ import annotations

from functools import partial
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from PIL import __version__ as pillow_version
from PIL.PngImagePlugin import PngInfo

HEIGHT, WIDTH = 48, 64
ORIENTATIONS = range(1, 9)
PILLOW_13 = int(pillow_version.partition(".")[0]) >= 13

_BLOCK = 8  # JPEG keeps blocks of one colour as they are
_BACK = {2: 0, 3: 3, 4: 1, 5: 5, 6: 2, 7: 6, 8: 4}  # the transposition of Pillow that undoes each orientation
_ORIENTATION = 274
_EXACT = {"quality": 100, "subsampling": 0}


def picture(seed: int, colour: bool) -> np.ndarray:
    """Draws blocks of colours that survive JPEG's change of colours, uint8 [H, W, 3], or of greys [H, W]."""
    draw = np.random.default_rng(seed)
    if not colour:
        return _blocks(draw.integers(0, 256, (HEIGHT // _BLOCK, WIDTH // _BLOCK), dtype=np.uint8))
    drawn = _blocks(draw.integers(0, 256, (16, 16, 3), dtype=np.uint8))
    file = BytesIO(pillow([drawn], 1, "JPEG", **_EXACT))
    kept = (np.asarray(Image.open(file)) == drawn).all(axis=2)
    return _blocks(draw.choice(drawn[kept], (HEIGHT // _BLOCK, WIDTH // _BLOCK)))


def _blocks(colours: np.ndarray) -> np.ndarray:
    return colours.repeat(_BLOCK, 0).repeat(_BLOCK, 1)


def png(pixels: np.ndarray, note: str = "") -> bytes:
    """Encodes a picture as anybody would; other notes give other bytes."""
    words = PngInfo()
    words.add_text("note", note)
    return pillow([pixels], 1, "PNG", pnginfo=words)


def files_of(pixels: np.ndarray, page: int | None, all_turns: bool = True) -> dict[str, bytes]:
    """Encodes a picture, uint8 [H, W] or [H, W, 3], in every way that keeps its pixels.

    Args:
        pixels: The picture.
        page: Which of two pages or frames it is; None for files that hold it alone. The other is its negative, of pages
            of a TIFF file cut to another size.
        all_turns: Whether in each orientation, or each way in one and each orientation in some way.
    """
    frames = [255 - pixels] * (1 if page is None else 2)
    pages = [frame[:_BLOCK, :_BLOCK] for frame in frames]
    frames[page or 0] = pages[page or 0] = pixels
    ways = (_in_colour if pixels.ndim == 3 else _in_grey)(frames, pages) | _in_both(frames)
    if not all_turns:
        ways = {
            name: (make, [turns[place % len(turns)]])
            for place, (name, (make, turns)) in enumerate(ways.items())
        }
    return {f"{name} {turn}": make(turn) for name, (make, turns) in ways.items() for turn in turns}


def _in_grey(frames, pages):
    wide = [page.astype(np.uint16) * 257 for page in pages]
    ways = {
        "tiff": (partial(tiff, pages), ORIENTATIONS),
        "tiff zlib": (partial(tiff, pages, compression="zlib"), ORIENTATIONS),
        "tiff white is zero": (partial(tiff, [255 - f for f in pages], photometric="miniswhite"), ORIENTATIONS),
        "tiff 16": (partial(tiff, wide), ORIENTATIONS),
        "tiff 16 big endian": (partial(tiff, wide, byteorder=">"), ORIENTATIONS),
        "tiff 16 white is zero": (partial(tiff, [65535 - f for f in wide], photometric="miniswhite"), ORIENTATIONS),
        "tiff 16 in 32": (partial(tiff, [f.astype(np.uint32) for f in wide]), ORIENTATIONS),
        "dicom": (partial(dicom, frames), [1]),
        "dicom 16": (partial(dicom, [f.astype(np.uint16) * 257 for f in frames]), [1]),
    }  # fmt: skip
    if len(frames) == 1:
        ways |= {
            "png 16": (partial(pillow, wide, form="PNG"), ORIENTATIONS),
            "jpeg": (partial(pillow, frames, form="JPEG", **_EXACT), ORIENTATIONS),
            "jpeg2000 16": (partial(pillow, wide, form="JPEG2000"), [1]),
            "pgm 16": (partial(pillow, wide, form="PPM"), [1]),
        }
    return ways


def _in_colour(frames, pages):
    wide = [page.astype(np.uint16) * 257 for page in pages]
    ways = {
        "tiff": (partial(tiff, pages), ORIENTATIONS),
        "tiff 16": (partial(tiff, wide), ORIENTATIONS),
        "tiff tiles": (partial(tiff, pages, tile=(16, 16)), ORIENTATIONS),
        "bigtiff": (partial(tiff, pages, bigtiff=True), ORIENTATIONS),
        "tiff cmyk": (partial(pillow, frames, form="TIFF", mode="CMYK"), ORIENTATIONS),
        "tiff lzw": (partial(pillow, frames, form="TIFF", compression="tiff_lzw"), ORIENTATIONS),
        "png opaque": (partial(pillow, frames, form="PNG", mode="RGBA"), ORIENTATIONS),
        "webp": (partial(pillow, frames, form="WEBP", lossless=True), ORIENTATIONS),
    }
    if len(frames) == 1:
        ways |= {
            "jpeg": (partial(pillow, frames, form="JPEG", **_EXACT), ORIENTATIONS),
            "jpeg cmyk": (partial(pillow, frames, form="JPEG", mode="CMYK", **_EXACT), ORIENTATIONS),
        }
    return ways


def _in_both(frames):
    ways = {
        "png": (partial(pillow, frames, form="PNG"), ORIENTATIONS),
        "gif": (partial(pillow, frames, form="GIF", mode="P"), [1]),
    }
    if len(frames) == 1 or PILLOW_13:  # older ones write all frames by the first one's palette
        ways["png palette"] = (partial(pillow, frames, form="PNG", mode="P"), ORIENTATIONS)
    if len(frames) == 1:
        others = [("BMP", {}), ("PPM", {}), ("JPEG2000", {"irreversible": False}), ("QOI", {"mode": "RGB"})]
        ways |= {form.lower(): (partial(pillow, frames, form=form, **more), [1]) for form, more in others}
    return ways


def _as_held(pixels: np.ndarray, turn: int) -> np.ndarray:
    """The pixels as a camera stores them that was held in this way."""
    if turn == 1:
        return pixels
    order = np.asarray(Image.fromarray(np.arange(pixels.shape[0] * pixels.shape[1], dtype=np.int32).reshape(
        pixels.shape[:2])).transpose(Image.Transpose(_BACK[turn])))  # fmt: skip
    return pixels.reshape(-1, *pixels.shape[2:])[order]


def pillow(frames: list[np.ndarray], turn: int, form: str, mode: str | None = None, **options) -> bytes:
    """Writes frames by Pillow."""
    images = [Image.fromarray(_as_held(frame, turn)) for frame in frames]
    if mode == "P":
        images = [image.convert("RGB").quantize(256, dither=Image.Dither.NONE) for image in images]
    elif mode:
        images = [image.convert(mode) for image in images]
    if turn != 1:
        options["exif"] = Image.Exif()
        options["exif"][_ORIENTATION] = turn
    if images[1:]:
        options |= {"save_all": True, "append_images": images[1:]}
    file = BytesIO()
    images[0].save(file, form, **options)
    return file.getvalue()


def tiff(frames: list[np.ndarray], turn: int, photometric: str | None = None, **options) -> bytes:
    """Writes pages by tifffile."""
    tifffile = pytest.importorskip("tifffile")
    writer = {name: options.pop(name) for name in ("byteorder", "bigtiff") if name in options}
    photometric = photometric or ("rgb" if frames[0].ndim == 3 else "minisblack")
    file = BytesIO()
    with tifffile.TiffWriter(file, **writer) as pages:
        for frame in frames:
            held, tags = _as_held(frame, turn), [(_ORIENTATION, 3, 1, turn, True)]
            pages.write(held, photometric=photometric, extratags=tags, metadata=None, **options)
    return file.getvalue()


def dicom(frames: list[np.ndarray], turn: int) -> bytes:
    """Writes frames by `write_dicom`."""
    content = BytesIO()
    write_dicom(content, np.stack(frames), NumberOfFrames=len(frames))
    return content.getvalue()


def write_dicom(file: Path | BytesIO, pixels: np.ndarray, bits: int | None = None, **words) -> None:
    """Writes one grey frame or several as a secondary capture, with further words as given."""
    pydicom = pytest.importorskip("pydicom")
    data = pydicom.Dataset()
    data.file_meta = pydicom.dataset.FileMetaDataset()
    data.file_meta.TransferSyntaxUID = pydicom.uid.ExplicitVRLittleEndian
    data.SOPClassUID = data.file_meta.MediaStorageSOPClassUID = pydicom.uid.SecondaryCaptureImageStorage
    data.SOPInstanceUID = data.file_meta.MediaStorageSOPInstanceUID = "1.2.3"
    data.Rows, data.Columns = pixels.shape[-2:]
    data.SamplesPerPixel, data.PhotometricInterpretation = 1, "MONOCHROME2"
    data.BitsAllocated = 8 * pixels.itemsize
    data.BitsStored = bits or data.BitsAllocated
    data.HighBit, data.PixelRepresentation = data.BitsStored - 1, int(pixels.dtype.kind == "i")
    data.PixelData = pixels.tobytes()
    for name, value in words.items():
        setattr(data, name, value)
    data.save_as(file, enforce_file_format=True)
