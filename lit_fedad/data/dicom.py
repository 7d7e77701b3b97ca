"""Images in DICOM files, brought to eight bits by the window that the file itself gives.

The steps are those of DICOM PS3.3 C.11: stored values, modality transform (rescale or a table), window or table of
values of interest, photometric interpretation. A file's words are checked before memory is taken for its pixels.
"""

from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from lit_fedad.core.extras import require
from lit_fedad.core.files import check_regular
from lit_fedad.data.input_files import check_pixels, chosen_page

FLAT = "flat"
"""Word of an image's ``info``: without a window, and of little of the range that its stored bits have."""

_LITTLE = 0.25  # share of this range: twelve bits of fourteen
_DEFLATED = "1.2.840.10008.1.2.1.99"  # would be inflated as a whole before anything can be checked
_NATIVE = ("1.2.840.10008.1.2", "1.2.840.10008.1.2.1", "1.2.840.10008.1.2.2")
_MOST_WORDS = 1_000_000  # bytes, of a file that came from anywhere
_PIXEL_DATA = 0x7FE00010
_PIXELS = (b"\xe0\x7f\x10\x00", b"\x7f\xe0\x00\x10")  # its tag, in both orders of bytes
_GREY = ("MONOCHROME1", "MONOCHROME2")
_WORDS = (
    *("WindowCenter", "WindowWidth", "VOILUTFunction", "VOILUTSequence"),
    *("RescaleSlope", "RescaleIntercept", "ModalityLUTSequence"),
)


def read_dicom(path: Path, page: int | None = None, alone: bool = False) -> Image.Image:
    """Reads a DICOM file of grey images.

    A file's first window is applied; one without a window is scaled by the whole range of its stored bits, so that the
    result does not depend on what the image shows.

    Args:
        path: The file.
        page: Which of its frames, from 0; None where it may hold one alone.
        alone: Whether a file of one frame is read whatever ``page`` says, as masks are.

    Returns:
        Grey image of eight bits; bright is what the file shows bright. Its ``info`` has `FLAT` where that is little.

    Raises:
        UserError: pydicom is missing, or it is no regular file.
        ValueError: The file is no DICOM, is deflated, has no pixels, colours, several frames or not that one.
        OverflowError: It has more pixels than `check_pixels` lets pass.
        Exception: pydicom cannot decode its pixels.
    """
    require("dicom", f"{path}: DICOM")
    import pydicom

    check_regular(path)
    try:
        if str(pydicom.filereader.read_file_meta_info(path).get("TransferSyntaxUID", "")) == _DEFLATED:
            raise ValueError("is a deflated DICOM file; save it with another transfer syntax")
        file = pydicom.dcmread(path)
    except pydicom.errors.InvalidDicomError:
        raise ValueError("is no DICOM file, or an old one without the letters DICM; export it anew") from None
    return _eight_bits(file, _checked_frame(file, page, alone))


def read_native_dicom(content: bytes, most_pixels: int | None, page: int | None = None) -> Image.Image:
    """Reads a DICOM file that came from anywhere: one whose pixels lie in it as they are, so that no decoder is called.

    Args:
        content: The file.
        most_pixels: Largest number of pixels of a frame; None for that of `check_pixels`.
        page: As for `read_dicom`.

    Returns:
        The same as `read_dicom`.

    Raises:
        OverflowError: It has more pixels.
        ValueError: As for `read_dicom`, or its pixels are compressed.
        Exception: pydicom cannot read it.
    """
    import pydicom
    from pydicom.filereader import read_dataset, read_partial, read_preamble

    # Words are read one by one, in Python: millions of empty ones would take minutes.
    head = BytesIO(content[:_MOST_WORDS])
    read_preamble(head, force=False)
    meta = read_dataset(head, False, True, stop_when=lambda tag, vr, length: tag.group != 2)
    if str(meta.get("TransferSyntaxUID", "")) not in _NATIVE:
        raise ValueError("is a compressed DICOM file; send it with another transfer syntax")
    head.seek(0)
    words = pydicom.dcmread(head, stop_before_pixels=True)
    width, height, frames = int(words.Columns), int(words.Rows), int(words.get("NumberOfFrames") or 1)
    check_pixels(width, height, most_pixels)
    if len(content) > frames * width * height * int(words.BitsAllocated) // 8 + _MOST_WORDS:
        raise ValueError(f"holds more than its pixels and {_MOST_WORDS} bytes beside them")
    if content[head.tell() : head.tell() + 4] not in _PIXELS:
        raise ValueError(f"holds no pixels behind its words, of {_MOST_WORDS} bytes at most")
    file: Any = read_partial(BytesIO(content), lambda tag, vr, length: tag > _PIXEL_DATA)
    return _eight_bits(file, _checked_frame(file, page))


def _checked_frame(file: Any, page: int | None, alone: bool = False) -> int:
    """Returns which frame is read of a file, from 0, after all checks that come before its pixels are decoded."""
    if "PixelData" not in file:
        raise ValueError("holds no pixels")
    if not (frames := int(file.get("NumberOfFrames") or 0)):
        frames = file.NumberOfFrames = 1  # pydicom warns of an empty one
    frame = chosen_page(frames, page, alone)
    if int(file.get("SamplesPerPixel") or 1) != 1 or file.get("PhotometricInterpretation") not in _GREY:
        raise ValueError("is no grey image (MONOCHROME1 or MONOCHROME2)")
    check_pixels(int(file.Columns), int(file.Rows))
    return frame


def _prepare(file: Any, page: int) -> None:
    """Brings the words of a frame to the top, and takes away empty ones, which say nothing."""
    for groups, number in (("SharedFunctionalGroupsSequence", 0), ("PerFrameFunctionalGroupsSequence", page)):
        for group in (file.get(groups) or [])[number : number + 1]:
            for part in ("FrameVOILUTSequence", "PixelValueTransformationSequence"):
                for item in (group.get(part) or [])[:1]:
                    file.update(item)
    for name in _WORDS:
        if name in file and (
            file[name].VM == 0 or (name.endswith("Sequence") and not file[name].value[0].get("LUTData"))
        ):
            del file[name]
    if "RescaleSlope" in file or "RescaleIntercept" in file:  # pydicom takes both or none
        file.RescaleSlope = file.get("RescaleSlope", 1)
        file.RescaleIntercept = file.get("RescaleIntercept", 0)


def _stored(file: Any, page: int) -> np.ndarray:
    """Stored values of a frame from 0; pydicom clears the bits above them, in which old files keep overlays."""
    from pydicom.pixels import pixel_array

    try:
        values: np.ndarray = pixel_array(file, index=page)
    except (RuntimeError, NotImplementedError, ImportError) as error:
        syntax = file.file_meta.TransferSyntaxUID.name
        raise ValueError(
            f"is compressed as {syntax}, which no installed decoder of pydicom reads; install one (pylibjpeg), or save"
            " it uncompressed"
        ) from error
    bits = int(file.BitsStored)
    if int(file.get("HighBit", bits - 1)) != bits - 1:
        raise ValueError(f"its {bits} bits end at bit {file.HighBit}; save it with the stored bits lowest")
    return values


def _eight_bits(file: Any, page: int) -> Image.Image:
    """A frame by the file's window."""
    from pydicom.pixels import apply_modality_lut, apply_voi

    stored = _stored(file, page)
    _prepare(file, page)
    values, flat = apply_modality_lut(stored, file), False
    if "WindowCenter" in file and "WindowWidth" in file:
        shares = _windowed(np.asarray(values, np.float64), file)
    elif "VOILUTSequence" in file:
        shares = apply_voi(np.rint(values).astype(np.int64), file) / (
            2 ** int(file.VOILUTSequence[0].LUTDescriptor[2]) - 1
        )
    else:
        bits = int(file.BitsStored)
        ends = [-(2 ** (bits - 1)), 2 ** (bits - 1) - 1] if file.PixelRepresentation else [0, 2**bits - 1]
        low, high = sorted(float(end) for end in apply_modality_lut(np.array(ends), file))
        if low == high:
            raise ValueError("its rescaling makes all values the same")
        shares = (values - low) / (high - low)
        flat = bits > 8 and 0 < np.ptp(shares) < _LITTLE
    shares = np.clip(shares, 0, 1)
    if file.PhotometricInterpretation == "MONOCHROME1":  # its least value is white
        shares = 1 - shares
    image = Image.fromarray(np.rint(shares * 255).astype(np.uint8))
    image.info = {FLAT: True} if flat else {}
    return image


def _windowed(values: np.ndarray, file: Any) -> np.ndarray:
    """Values in the file's first window, as shares of its range: DICOM PS3.3 C.11.2.1.2 and C.11.2.1.3."""
    center, width = (float(np.ravel(file[name].value)[0]) for name in ("WindowCenter", "WindowWidth"))
    function = file.get("VOILUTFunction") or "LINEAR"
    if width <= 0 or (function == "LINEAR" and width < 1) or not np.isfinite([center, width]).all():
        raise ValueError(f"has a window of centre {center:g} and width {width:g}")
    if function == "SIGMOID":
        return 1 / (1 + np.exp(-4 * (values - center) / width))
    if function == "LINEAR_EXACT":
        return (values - center) / width + 0.5
    return (values - (center - 0.5)) / max(width - 1, 1e-9) + 0.5
