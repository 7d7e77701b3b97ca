"""An exported detector, computed by ONNX Runtime: an image in, score, decision and heatmap out."""

from __future__ import annotations

from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from PIL import Image

from lit_fedad.core.errors import UserError, first_line
from lit_fedad.core.plain_values import plain_json
from lit_fedad.data.transform import ImageTransform
from lit_fedad.deployment.exported import DetectorSheet, read_sheet
from lit_fedad.report.overlay import colour_ends, overlay

_FILE = "detector.onnx"
# Outputs that detectors, and those that classifiers must have.
_REQUIRED_OUTPUTS = ({"image_score", "p_value", "decision"}, {"probabilities", "class"})


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
        content, providers = self.sheet.content(folder, _FILE), ["CPUExecutionProvider"]
        try:
            self._session = onnxruntime.InferenceSession(content, options, providers=providers)
        except Exception as error:  # onnxruntime has exceptions of many kinds, all of its own
            raise UserError(
                f"{folder / _FILE}: onnxruntime cannot load it ({first_line(error)}); export it again"
            ) from error
        self._outputs = [output.name for output in self._session.get_outputs()]
        if not _REQUIRED_OUTPUTS[self.sheet.classifies] <= set(self._outputs):
            raise UserError(f"{folder / _FILE}: is no detector of lit-fedad; export it again")
        self._check(folder)

    @property
    def page(self) -> int | None:
        """Page or frame, from 0, that is read of each file; None where files hold a single one."""
        return self._transform.page

    @property
    def localises(self) -> bool:
        """Tells whether it has heatmaps."""
        return "anomaly_map" in self._outputs

    def __call__(self, image: Image.Image) -> Verdict:
        """Scores an image.

        Args:
            image: An image in eight-bit RGB; a ``caution`` in its ``info`` becomes an entry of ``Verdict.words``.

        Raises:
            UserError: If a classifier names a class that there is none of.
        """
        pixels, shown = self._transform.tensor_and_shown(image)
        values = self._session.run(self._outputs, {"pixels": pixels.numpy()[None]})
        outputs = {name: value[0] for name, value in zip(self._outputs, values, strict=True)}
        words = self._entries(outputs)
        if "caution" in image.info:
            words["caution"] = image.info["caution"]
        return Verdict(words, shown.numpy(), outputs.get("anomaly_map"))

    def _check(self, folder: Path) -> None:
        """Scores a black image, so that files that do not fit each other are refused before anybody asks.

        Raises:
            UserError: If it cannot be scored.
        """
        try:
            verdict = self(Image.new("RGB", (8, 8)))
            if verdict.anomaly_map is not None:
                self.heatmap(verdict)
        except Exception as error:  # of onnxruntime, numpy and Pillow
            raise UserError(
                f"{folder / _FILE}: does not score an image as the files beside it say ({first_line(error)[:160]});"
                " export it again"
            ) from error

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

    def _entries(self, outputs: dict[str, Any]) -> dict[str, Any]:
        sheet = self.sheet
        if sheet.classifies:
            number, probabilities = int(outputs["class"]), outputs["probabilities"]
            if not (0 <= number < len(sheet.classes) == len(probabilities)):
                raise UserError(
                    f"it gives {len(probabilities)} probabilities and class {number}, and detector.json names"
                    f" {len(sheet.classes)} classes"
                )
            return {"class": sheet.classes[number], "probability": _number(probabilities[number])}
        return {
            "score": _number(outputs["image_score"]),
            # With nine digits, 0.1 in float32 would become more than 0.1.
            "p_value": _number(outputs["p_value"], 6),
            "decision": "anomalous" if outputs["decision"] else "normal",
            "threshold": None if sheet.threshold is None else _number(sheet.threshold),
            "alpha": sheet.alpha,
        }


def _transform(folder: Path, sheet: DetectorSheet) -> ImageTransform:
    """Reads ``preprocessing.json``: the geometry; normalisation is part of the graph."""
    name = "preprocessing.json"
    content = sheet.content(folder, name)
    try:
        settings = plain_json(content)
        channels = {"RGB": 3, "L": 1}[settings["mode"]]
        return ImageTransform(
            settings["size"],
            settings["resize"],
            settings["fit"],
            (0.0,),
            (1.0,),
            channels,
            settings.get("page"),
        )
    except (ValueError, KeyError, TypeError, UserError) as error:
        raise UserError(
            f"{folder / name}: cannot be read ({first_line(error)[:160]}); export it again"
        ) from error


def _number(value: Any, digits: int = 9) -> float | None:
    """Rounds a number for JSON, by default to all digits of a float32; None for NaN and infinity, which JSON lacks."""
    return float(f"{value:.{digits}g}") if np.isfinite(value) else None
