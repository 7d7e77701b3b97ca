"""A trained client as an object that scores images in memory or on disk."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, overload

import numpy as np
import torch
from lightning.fabric import Fabric
from PIL import Image, ImageOps
from torch import Tensor

from lit_fedad.contracts import Client
from lit_fedad.core.errors import UserError
from lit_fedad.data.pictures import Picture, to_rgb
from lit_fedad.data.transform import ImageTransform
from lit_fedad.deployment.detector import decision_rule
from lit_fedad.deployment.predict import ANOMALOUS, NORMAL, choose_client
from lit_fedad.evaluation.predict import predict_batch
from lit_fedad.experiment.finished_run import complete_run, one_process, same_model
from lit_fedad.experiment.geometry import image_transform
from lit_fedad.experiment.trained_client import load_client
from lit_fedad.metrics.conformal import DecisionRule

ImageLike: TypeAlias = str | os.PathLike[str] | Image.Image | np.ndarray | Tensor
"""Path; Pillow image; uint8 array [H, W] or [H, W, 3]; or tensor [3, H, W], uint8 or float in [0, 1]."""


@dataclass(frozen=True)
class Scored:
    """What a detector says of one image.

    Attributes:
        score: Anomaly score; higher is more anomalous.
        p_value: Share of normal images that score as high or higher, by conformal calibration.
        decision: ``"normal"`` or ``"anomalous"``.
        map: Score of each pixel at the size that the detector sees, float32 [H, W]; None where the task has none.
    """

    score: float
    p_value: float
    decision: str
    map: np.ndarray | None


class LiveDetector:
    """Scores images with a trained client; see `load_detector`.

    Args:
        client: The trained client.
        fabric: Its device.
        transform: From an image to its input.
        rule: Its decision rule.
        batch_size: Images at a time.
    """

    def __init__(
        self, client: Client, fabric: Fabric, transform: ImageTransform, rule: DecisionRule, batch_size: int
    ) -> None:
        self._client, self._fabric, self._transform = client, fabric, transform
        self._rule, self._batch_size = rule, batch_size

    @property
    def threshold(self) -> float:
        """Score above which an image is anomalous; infinite where too few images calibrate the promised rate."""
        return self._rule.threshold

    @overload  # a path is a sequence of characters too: the first signature wins
    def __call__(self, images: ImageLike) -> Scored: ...  # type: ignore[overload-overlap]

    @overload
    def __call__(self, images: Sequence[ImageLike]) -> list[Scored]: ...

    def __call__(self, images: ImageLike | Sequence[ImageLike]) -> Scored | list[Scored]:
        """Scores one image, or each of several.

        Args:
            images: One image, or a sequence of them; an array [N, H, W, 3] or tensor [N, 3, H, W] is several.

        Returns:
            One `Scored` for one image, otherwise a list in the order of the images.

        Raises:
            UserError: If an image cannot be read, or is of another type or shape.
        """
        if isinstance(images, str | os.PathLike | Image.Image):
            return self._score([images])[0]
        if isinstance(images, np.ndarray | Tensor) and images.ndim < 4:
            return self._score([images])[0]
        return self._score(list(images))

    def _score(self, images: Sequence[ImageLike]) -> list[Scored]:
        scored: list[Scored] = []
        for start in range(0, len(images), self._batch_size):
            pixels = [self._pixels(image) for image in images[start : start + self._batch_size]]
            prediction = predict_batch(self._client, {"image": torch.stack(pixels)}, self._fabric)
            p_values = self._rule.scores.p_values(prediction.image_score)
            maps = prediction.anomaly_map
            for place, score in enumerate(prediction.image_score.tolist()):
                own_map = None if maps is None else maps[place].cpu().numpy()
                decision = NORMAL if score <= self.threshold else ANOMALOUS
                scored.append(Scored(score, float(p_values[place]), decision, own_map))
        return scored

    def _pixels(self, image: Any) -> Tensor:
        """Reads or converts one image to the input of the model, float32 [C, H, W]."""
        if isinstance(image, str | os.PathLike):
            return self._transform.image(Path(image))
        if isinstance(image, Tensor):
            image = _array(image)
        if isinstance(image, np.ndarray):
            if image.dtype != np.uint8 or not (
                image.ndim == 2 or (image.ndim == 3 and image.shape[2] in (1, 3))
            ):
                raise UserError(
                    f"array of {image.dtype}, shape {list(image.shape)}: give uint8 [H, W] or [H, W, 3],"
                    " with values from 0 to 255"
                )
            image = Image.fromarray(image[:, :, 0] if image.shape[2:] == (1,) else image)
        if not isinstance(image, Image.Image):
            raise UserError(f"{type(image).__name__}: give a path, a PIL image, an array or a tensor")
        full = 65535 if image.mode.startswith(("I", "F")) else 255
        upright = Picture(ImageOps.exif_transpose(image), full)
        return self._transform.tensor(to_rgb(upright, Path("image in memory")))


def _array(image: Tensor) -> np.ndarray:
    """Converts a tensor [C, H, W] to uint8 [H, W, C].

    Raises:
        UserError: If it has another shape, or values outside [0, 1].
    """
    if image.ndim != 3 or image.shape[0] not in (1, 3):
        raise UserError(f"tensor of shape {list(image.shape)}: give [3, H, W], or [1, H, W] for grey")
    values = image.detach().cpu()
    if values.is_floating_point():
        if not bool(((values >= 0) & (values <= 1)).all()):
            raise UserError("tensor of floats: give values from 0 to 1, not normalised")
        values = (values.float() * 255).round().to(torch.uint8)
    return values.permute(1, 2, 0).numpy()


def load_detector(
    run: str | os.PathLike[str],
    client: int | str | None = None,
    alpha: float | None = None,
    product: str | None = None,
    version: int | None = None,
) -> LiveDetector:
    """Loads a trained client of a complete run.

    Args:
        run: Folder of the run, or its MLflow run id.
        client: Number of the client, or name of the site; None for the client with most training images.
        alpha: Promised rate of false alarms; None for the run's own.
        product: Product that all images show, where it is known: it chooses the calibration scores.
        version: Number of the detector's version: 0 as it was trained, None for the default.

    Raises:
        UserError: If there is no such complete run, client or product, or the run learned classes.
    """
    folder, result, config = complete_run(os.fspath(run), None, version)
    model = same_model(config, result)
    if model.task.kind == "classification":
        raise UserError(f"run={run}: it learned classes; lit-fedad predict writes them")
    calibration = folder.calibration()
    number = choose_client(client, result, calibration.clients)
    fabric = one_process(config)
    load_client(model, folder.path, folder.config(), number, fabric, result.get("own_client"))
    rule = decision_rule(calibration, number, folder.alpha() if alpha is None else alpha, product)
    transform = image_transform(config, model.task)
    return LiveDetector(model.client, fabric, transform, rule, config["evaluation"]["batch_size"])
