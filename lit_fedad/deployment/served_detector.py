"""An exported detector, computed by ONNX Runtime, and the images that arrive over HTTP for it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from email.message import Message
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from PIL import Image

from lit_fedad.core.errors import UserError, first_line
from lit_fedad.core.extras import install
from lit_fedad.data.pictures import caution, decode_upload, sniff, to_rgb
from lit_fedad.data.transform import ImageTransform
from lit_fedad.deployment.exported import DetectorSheet, read_sheet
from lit_fedad.report.overlay import colour_ends, overlay

FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "TIFF", "DICOM")
"""Formats that are read: Pillow's, and DICOM by pydicom. No other decoder ever sees an upload."""


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
        RefusedError: 422, if a form holds no file.

    Example:
        >>> form = b'--x\r\nContent-Disposition: form-data; name="f"; filename="a"\r\n\r\nBM\r\n--x--'
        >>> file_in(form, "multipart/form-data; boundary=x"), file_in(b"BM", "image/bmp")
        (b'BM', b'BM')
    """
    header = Message()
    header["Content-Type"] = content_type
    boundary = header.get_boundary()
    if header.get_content_type() != "multipart/form-data" or not boundary:
        return content
    for part in content.split(b"--" + boundary.encode())[1:]:
        head, _, body = part.partition(b"\r\n\r\n")
        if b"filename" in head.lower():
            return body.removesuffix(b"\r\n")
    raise RefusedError(422, "the form holds no file: curl -F file=@IMAGE.png")


def read_upload(content: bytes, form: str, most_pixels: int, page: int | None = None) -> Image.Image:
    """Decodes an upload; its size is read from its header before any memory is taken for its pixels.

    Args:
        content: The bytes.
        form: One of `FORMATS`, the only one that is tried.
        most_pixels: Largest width times height.
        page: Page or frame that is read, from 0; None where it may hold one alone.

    Returns:
        The image in eight-bit RGB, upright; its ``info`` has nothing but ``caution``, what may be wrong with it.

    Raises:
        RefusedError: 413, if it has more pixels; 422, if it is no image of this format.
    """
    try:
        if sniff(content) != form:
            raise RefusedError(422, f"is no {form} file")
        picture = decode_upload(content, form, most_pixels, page)
        image = to_rgb(picture, Path("upload"))
        words = caution(picture)
        image.info = {"caution": words} if words else {}
        return image
    except RefusedError:
        raise
    except OverflowError as error:
        raise RefusedError(413, str(error)) from error
    except UserError as error:
        raise RefusedError(422, str(error)) from error
    # Pillow and pydicom report damage through exceptions of many kinds.
    except Exception as error:
        raise RefusedError(422, f"cannot be read as {form} ({first_line(error)})") from error


_FILE = "detector.onnx"
_NEEDED = ({"image_score", "p_value", "decision"}, {"probabilities", "class"})  # of detectors, of classifiers


@dataclass(frozen=True)
class Verdict:
    """What a detector says of an image.

    Attributes:
        words: Score, p-value, decision and threshold, or class and probability; ready for JSON.
        image: The image as it was scored, uint8 [H, W, 3].
        anomaly_map: Score of each pixel [H, W]; None where the detector does not localise.
    """

    words: dict[str, Any]
    image: np.ndarray
    anomaly_map: np.ndarray | None


class ServedDetector:
    """A detector in the folder that ``lit-fedad export`` wrote.

    Args:
        folder: The folder.
        threads: Threads that compute one image; 0 for as many as there are cores.

    Raises:
        UserError: A file is missing, was changed, or is no such detector.
    """

    def __init__(self, folder: Path, threads: int = 0) -> None:
        self.sheet: DetectorSheet = read_sheet(folder)
        self._transform = _transform(folder, self.sheet)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        try:
            self._session = onnxruntime.InferenceSession(
                self.sheet.content(folder, _FILE), options, providers=["CPUExecutionProvider"]
            )
        except UserError:
            raise
        except Exception as error:  # onnxruntime has exceptions of many kinds, all of its own
            raise UserError(
                f"{folder / _FILE}: onnxruntime cannot load it ({first_line(error)}); export it again"
            ) from error
        self._outputs = [output.name for output in self._session.get_outputs()]
        if not _NEEDED[self.sheet.classifies] <= set(self._outputs):
            raise UserError(f"{folder / _FILE}: is no detector of lit-fedad; export it again")

    @property
    def page(self) -> int | None:
        """Page or frame, from 0, that is read of each file; None where files hold one alone."""
        return self._transform.page

    @property
    def localises(self) -> bool:
        """Tells whether it has heatmaps."""
        return "anomaly_map" in self._outputs

    def __call__(self, image: Image.Image) -> Verdict:
        """Scores an image.

        Args:
            image: In eight-bit RGB; a ``caution`` in its ``info`` becomes a word of the verdict.
        """
        pixels = self._transform.tensor(image).numpy()[None]
        values = self._session.run(self._outputs, {"pixels": pixels})
        outputs = {name: value[0] for name, value in zip(self._outputs, values, strict=True)}
        shown = self._transform.shown(image).numpy()
        words = self._words(outputs) | {key: image.info[key] for key in ("caution",) if key in image.info}
        return Verdict(words, shown, outputs.get("anomaly_map"))

    def heatmap(self, verdict: Verdict) -> bytes:
        """Draws a heatmap.

        Args:
            verdict: Of a detector that localises.

        Returns:
            A PNG file of the size that is scored, in the colours of `colour_ends`.
        """
        assert verdict.anomaly_map is not None
        assert self.sheet.colour is not None
        ends = colour_ends(verdict.anomaly_map, verdict.words["score"] or 0.0, self.sheet.colour)
        file = BytesIO()
        Image.fromarray(overlay(verdict.image, verdict.anomaly_map, *ends)).save(file, "png")
        return file.getvalue()

    def _words(self, outputs: dict[str, Any]) -> dict[str, Any]:
        sheet = self.sheet
        if sheet.classifies:
            number = int(outputs["class"])
            return {"class": sheet.classes[number], "probability": _number(outputs["probabilities"][number])}
        return {
            "score": _number(outputs["image_score"]),
            "p_value": _number(outputs["p_value"]),
            "decision": "anomalous" if outputs["decision"] else "normal",
            "threshold": sheet.threshold,
            "alpha": sheet.alpha,
        }


def _transform(folder: Path, sheet: DetectorSheet) -> ImageTransform:
    """Reads ``preprocessing.json``: the geometry; normalisation is part of the graph."""
    name = "preprocessing.json"
    try:
        how = json.loads(sheet.content(folder, name))
        channels = {"RGB": 3, "L": 1}[how["mode"]]
        return ImageTransform(
            how["size"], how["resize"], how["fit"], (0.0,), (1.0,), channels, how.get("page")
        )
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{folder / name}: cannot be read ({first_line(error)}); export it again") from error


def _number(value: Any) -> float | None:
    """A number that JSON has: NaN and infinity are none."""
    return float(value) if np.isfinite(value) else None
