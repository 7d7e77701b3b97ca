"""Images in DICOM files, brought to eight bits by the window that the file itself gives.

The steps are those of DICOM PS3.3 C.11: stored values, modality transform (rescale or a table), window or table of
values of interest, photometric interpretation. A file's header is checked before memory is taken for its pixels.
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
"""Key in an image's ``info``: its file has no window, and its values span little of the range of the stored bits."""

_FLAT_SHARE = 0.25  # of the range of the stored bits: that of twelve bits in fourteen
_DEFLATED = "1.2.840.10008.1.2.1.99"  # pydicom inflates the whole file before anything can be checked
_UNCOMPRESSED = ("1.2.840.10008.1.2", "1.2.840.10008.1.2.1", "1.2.840.10008.1.2.2")  # transfer syntaxes
_MAX_HEADER = 1_000_000  # bytes of an uploaded file without its pixels
_PIXEL_DATA = 0x7FE00010
_PIXEL_TAGS = (b"\xe0\x7f\x10\x00", b"\x7f\xe0\x00\x10")  # the same tag in both byte orders
_GREY = ("MONOCHROME1", "MONOCHROME2")
_ATTRIBUTES = (
    *("WindowCenter", "WindowWidth", "VOILUTFunction", "VOILUTSequence"),
    *("RescaleSlope", "RescaleIntercept", "ModalityLUTSequence"),
)


def read_dicom(path: Path, page: int | None = None, alone: bool = False) -> Image.Image:
    """Reads a DICOM file of grey images.

    A file's first window is applied; one without a window is scaled by the whole range of its stored bits, so that the
    result does not depend on what the image shows.

    Args:
        path: The file.
        page: Number of the frame, from 0; None where the file must hold a single one.
        alone: Whether a file with a single frame is read whatever ``page`` says, as is done for masks.

    Returns:
        Grey image of eight bits, in which bright pixels are those that the file shows bright. Its ``info`` has the key
        `FLAT` where the values span little of their range.

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
    """Reads an uploaded DICOM file, whose pixels must be uncompressed, so that no decoder is called.

    Args:
        content: The file.
        most_pixels: Largest number of pixels of a frame; None for that of `check_pixels`.
        page: As for `read_dicom`.

    Returns:
        The same as `read_dicom`.

    Raises:
        OverflowError: A frame has more pixels.
        ValueError: As for `read_dicom`, or its pixels are compressed.
        Exception: pydicom cannot read it.
    """
    import pydicom
    from pydicom.filereader import read_dataset, read_partial, read_preamble

    # pydicom reads the elements of a header one by one, in Python: millions of empty ones would take minutes.
    head = BytesIO(content[:_MAX_HEADER])
    read_preamble(head, force=False)
    meta = read_dataset(head, False, True, stop_when=lambda tag, vr, length: tag.group != 2)
    if str(meta.get("TransferSyntaxUID", "")) not in _UNCOMPRESSED:
        raise ValueError("is a compressed DICOM file; send it with another transfer syntax")
    head.seek(0)
    header = pydicom.dcmread(head, stop_before_pixels=True)
    width, height, frames = int(header.Columns), int(header.Rows), int(header.get("NumberOfFrames") or 1)
    check_pixels(width, height, most_pixels)
    if len(content) > frames * width * height * int(header.BitsAllocated) // 8 + _MAX_HEADER:
        raise ValueError(f"holds more than its pixels and {_MAX_HEADER} bytes beside them")
    if content[head.tell() : head.tell() + 4] not in _PIXEL_TAGS:
        raise ValueError(f"holds no pixels behind its words, of {_MAX_HEADER} bytes at most")
    file: Any = read_partial(BytesIO(content), lambda tag, vr, length: tag > _PIXEL_DATA)
    return _eight_bits(file, _checked_frame(file, page))


def _checked_frame(file: Any, page: int | None, alone: bool = False) -> int:
    """Returns the number of the frame to read, from 0, after all checks that need no decoded pixels."""
    if "PixelData" not in file:
        raise ValueError("holds no pixels")
    if not (frames := int(file.get("NumberOfFrames") or 0)):
        frames = file.NumberOfFrames = 1  # pydicom warns of an empty number
    frame = chosen_page(frames, page, alone)
    if int(file.get("SamplesPerPixel") or 1) != 1 or file.get("PhotometricInterpretation") not in _GREY:
        raise ValueError("is no grey image (MONOCHROME1 or MONOCHROME2)")
    check_pixels(int(file.Columns), int(file.Rows))
    return frame


def _simplify(file: Any, page: int) -> None:
    """Copies the attributes of a frame to the top level of the file, and deletes empty ones."""
    for groups, number in (("SharedFunctionalGroupsSequence", 0), ("PerFrameFunctionalGroupsSequence", page)):
        for group in (file.get(groups) or [])[number : number + 1]:
            for sequence in ("FrameVOILUTSequence", "PixelValueTransformationSequence"):
                for item in (group.get(sequence) or [])[:1]:
                    file.update(item)
    for name in _ATTRIBUTES:
        if name in file and (
            file[name].VM == 0 or (name.endswith("Sequence") and not file[name].value[0].get("LUTData"))
        ):
            del file[name]
    if "RescaleSlope" in file or "RescaleIntercept" in file:  # pydicom needs both or none
        file.RescaleSlope = file.get("RescaleSlope", 1)
        file.RescaleIntercept = file.get("RescaleIntercept", 0)


def _stored(file: Any, page: int) -> np.ndarray:
    """Returns the stored values of frame ``page``; pydicom clears the bits above them, which may hold overlays."""
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
    """Converts a frame to eight bits by the file's window, or by the range of its stored bits."""
    from pydicom.pixels import apply_modality_lut, apply_voi

    stored = _stored(file, page)
    _simplify(file, page)
    values, flat = apply_modality_lut(stored, file), False
    if "WindowCenter" in file and "WindowWidth" in file:
        shares = _windowed(np.asarray(values, np.float64), file)
    elif "VOILUTSequence" in file:
        shares = apply_voi(np.rint(values).astype(np.int64), file) / (
            2 ** int(file.VOILUTSequence[0].LUTDescriptor[2]) - 1
        )
    else:
        bits = int(file.BitsStored)
        extremes = [-(2 ** (bits - 1)), 2 ** (bits - 1) - 1] if file.PixelRepresentation else [0, 2**bits - 1]
        low, high = sorted(float(extreme) for extreme in apply_modality_lut(np.array(extremes), file))
        if low == high:
            raise ValueError("its rescaling makes all values the same")
        shares = (values - low) / (high - low)
        flat = bits > 8 and 0 < np.ptp(shares) < _FLAT_SHARE
    shares = np.clip(shares, 0, 1)
    if file.PhotometricInterpretation == "MONOCHROME1":  # its least value is white
        shares = 1 - shares
    image = Image.fromarray(np.rint(shares * 255).astype(np.uint8))
    image.info = {FLAT: True} if flat else {}
    return image


def _windowed(values: np.ndarray, file: Any) -> np.ndarray:
    """Returns values as shares of the range of the file's first window: DICOM PS3.3 C.11.2.1.2 and C.11.2.1.3."""
    center, width = (float(np.ravel(file[name].value)[0]) for name in ("WindowCenter", "WindowWidth"))
    function = file.get("VOILUTFunction") or "LINEAR"
    if width <= 0 or (function == "LINEAR" and width < 1) or not np.isfinite([center, width]).all():
        raise ValueError(f"has a window of centre {center:g} and width {width:g}")
    if function == "SIGMOID":
        return 1 / (1 + np.exp(-4 * (values - center) / width))
    if function == "LINEAR_EXACT":
        return (values - center) / width + 0.5
    return (values - (center - 0.5)) / max(width - 1, 1e-9) + 0.5
