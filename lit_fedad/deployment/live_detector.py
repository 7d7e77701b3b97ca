"""A trained client of a complete run, opened to score images on disk or in memory."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, TypeAlias, overload

import numpy as np
import torch
from lightning.fabric import Fabric
from PIL import Image, ImageOps
from torch import Tensor

from lit_fedad.contracts import Client
from lit_fedad.core.client_names import ClientNames
from lit_fedad.core.config import Config
from lit_fedad.core.errors import UserError
from lit_fedad.core.files import expand_home, given_path
from lit_fedad.data.pictures import Picture, caution, to_rgb, warn_once
from lit_fedad.data.transform import ImageTransform
from lit_fedad.evaluation.predict import predict_batch
from lit_fedad.experiment.datasets import image_transform
from lit_fedad.experiment.finished_run import built_of, complete_run, load_client, one_process, same_model
from lit_fedad.experiment.run_files import file_named_in_errors
from lit_fedad.experiment.run_folder import RunFolder
from lit_fedad.metrics.conformal import Alpha, Calibration, DecisionRule
from lit_fedad.report.console import Display
from lit_fedad.tasks.patches import PatchTask

NORMAL, ANOMALOUS = "normal", "anomalous"


@dataclass(frozen=True)
class Scored:
    """What a detector says of one image.

    Attributes:
        score: Anomaly score; higher is more anomalous.
        p_value: Share of normal images that score as high or higher, by conformal calibration.
        decision: ``"normal"`` or ``"anomalous"``.
        map: Score of each pixel at the size that the detector sees, float32 [H, W]; None where the task has none.
        alike: The product that the image looks like, where one was told and the model tells products apart; else None.
    """

    score: float
    p_value: float
    decision: str
    map: np.ndarray | None
    alike: str | None = None


@dataclass(frozen=True)
class OpenedClient:
    """A trained client and what it scores images with.

    Attributes:
        folder: Folder of the run, or of its version.
        result: Content of its ``result.json``.
        config: Its configuration on this machine.
        client: The client, with its trained weights.
        number: Its number.
        calibration: Calibration scores; of no client where the run learned classes.
        fabric: A Fabric of one process.
        transform: From an image file to the client's input.
    """

    folder: RunFolder
    result: Mapping[str, Any]
    config: Config
    client: Client
    number: int
    calibration: Calibration
    fabric: Fabric
    transform: ImageTransform

    @property
    def classifies(self) -> bool:
        """Tells whether the run learned classes."""
        return self.client.task.kind == "classification"

    @property
    def title(self) -> str:
        """Names the client in words."""
        return ClientNames.of(self.result).title(self.number)

    def rule(
        self, alpha: Alpha | None = None, product: str | None = None, client: int | None = None
    ) -> DecisionRule:
        """Chooses a decision rule.

        Args:
            alpha: Promised rate of false alarms; None for the run's own.
            product: Product that all images show, where it is known.
            client: Whose rule it is; None for that of the client itself.

        Raises:
            UserError: If alpha is not in (0, 1), or nobody has calibrated with this product.
        """
        chosen = self.folder.alpha() if alpha is None else alpha
        if chosen != "auto" and not (isinstance(chosen, int | float) and 0 < chosen < 1):
            raise UserError(f"alpha={chosen} must be above 0 and below 1")
        products = self.calibration.products
        if product is not None and product not in products:
            raise UserError(f"product={product}: calibrated are {', '.join(products) or 'none'}")
        return self.calibration.rule(self.number if client is None else client, chosen, product)

    def check_options(self, **options: object) -> None:
        """Refuses options of a decision, such as a product, where the run learned classes."""
        given = [f"{name}={value}" for name, value in options.items() if value is not None]
        if self.classifies and given:
            raise UserError(f"{given[0]}: a classifier has no threshold; leave it out")

    def scored(
        self, images: Iterable[Tensor], rule: DecisionRule, product: str | None = None
    ) -> list[Scored]:
        """Scores images, each float32 [C, H, W] as `transform` gives them; takes one batch after the other.

        Args:
            images: The images.
            rule: The rule that decides about them.
            product: Product that they are said to show: what they look like is computed only to be compared with it.
        """
        scored, waiting = list[Scored](), iter(images)
        while batch := list(islice(waiting, self.config["evaluation"]["batch_size"])):
            scored += self._scored_batch(torch.stack(batch), rule, product)
        return scored

    def _scored_batch(self, images: Tensor, rule: DecisionRule, product: str | None) -> list[Scored]:
        batch: dict[str, Any] = {"image": images}
        alike: list[str | None] = [None] * len(images)
        if product is not None:
            batch, alike = self.recognised(batch)
        prediction = predict_batch(self.client, batch, self.fabric)
        p_values, maps = rule.scores.p_values(prediction.image_score), prediction.anomaly_map
        return [
            Scored(
                score,
                float(p_values[row]),
                NORMAL if score <= rule.threshold else ANOMALOUS,  # NaN is not called normal
                None if maps is None else maps[row].cpu().numpy(),
                alike[row],
            )
            for row, score in enumerate(prediction.image_score.tolist())
        ]

    def recognised(self, batch: dict[str, Any]) -> tuple[dict[str, Any], list[str | None]]:
        """Finds the product that each image of a batch looks like, where the client's model tells products apart.

        Returns:
            The batch, with the backbone's features where they were computed; and the products, None for an image that
            looks like none that has a name.
        """
        task = self.client.task
        unknown: list[str | None] = [None] * len(batch["image"])
        if not isinstance(task, PatchTask) or task.kinds == 1:
            return batch, unknown
        with torch.inference_mode(), self.fabric.autocast():
            batch = task.with_pyramid(self.fabric.to_device(batch))
            kinds = task.nearest_kind(batch)
        partition = self.result["partition"]
        counts = map(sum, zip(*partition["counts"], strict=True))
        images = dict(zip(partition["products"], counts, strict=True))
        names = [*(product for product in task.products if images.get(product)), None]
        return batch, unknown if kinds is None else [names[kind] for kind in kinds.tolist()]


def most_look_like(alike: Sequence[str | None]) -> str | None:
    """Returns the product that more than half of some images look like; None if there is none."""
    (product, images), *_ = Counter(alike).most_common(1) or [(None, 0)]
    return product if 2 * images > len(alike) else None


def warn_of_product(product: str | None, alike: Sequence[str | None], display: Display) -> None:
    """Warns of images of which most look like another product than the one that is given for all."""
    if product is not None and (other := most_look_like(alike)) not in (None, product):
        display.warn(
            f"most of {len(alike)} images look like {other}, not like {product}; is that the product?"
        )


def open_client(
    run: str,
    client: int | str | None,
    version: int | None,
    overrides: Mapping[str, str] | None = None,
    fabric: Mapping[str, Any] | None = None,
) -> OpenedClient:
    """Opens a trained client; the run's training images need not exist any more.

    Args:
        run: MLflow run id, or the run's folder.
        client: Number of the client, or name of the site; None for the client with most training images.
        version: Number of the detector's version: 0 as it was trained, None for the default.
        overrides: Values that differ on this machine, such as ``backbone.weights``.
        fabric: Settings of Fabric, such as the accelerator; None for those of the run.

    Raises:
        UserError: If there is no such complete run, version or client, or the backbone differs from the run's.
    """
    folder, result, config = complete_run(run, overrides, version)
    with built_of(folder, overrides):
        model = same_model(config, result)
    classifies = model.task.kind == "classification"
    calibration = Calibration({}, shared=False) if classifies else folder.calibration()
    with file_named_in_errors(folder.path / "calibration.json", given=["client"]):
        number = choose_client(client, result, calibration.clients)
    with built_of(folder, overrides):
        launched = one_process(config if fabric is None else {**config, "fabric": fabric})
        load_client(model, folder.path, folder.config(), number, launched, result.get("own_client"))
        transform = image_transform(config, model.task)
    return OpenedClient(folder, result, config, model.client, number, calibration, launched, transform)


def choose_client(client: int | str | None, result: Mapping[str, Any], calibrated: Collection[int]) -> int:
    """Finds the client that a user names, or chooses the one with most training images.

    Args:
        client: Its number, or the name of a site; None to choose.
        result: Content of the run's ``result.json``.
        calibrated: Clients that were calibrated, without those that were left out of the run; empty for classifiers.

    Raises:
        UserError: If it is no client that holds images and took part in the run.
    """
    names, sizes = ClientNames.of(result), result["partition"]["sizes"]
    holders = [
        number for number, size in enumerate(sizes) if size and (not calibrated or number in calibrated)
    ]
    if not holders:
        raise UserError("holds scores of no client of the run; restore it from a copy")
    if client is None:
        return max(holders, key=lambda number: (sizes[number], -number))
    number = names.number(str(client))
    if number not in holders:
        raise UserError(f"client={client}: the run has clients {', '.join(map(names.label, holders))}")
    return number


ImageLike: TypeAlias = str | os.PathLike[str] | Image.Image | np.ndarray | Tensor
"""Path; Pillow image; uint8 array [H, W] or [H, W, 3]; or tensor [3, H, W], uint8 or float in [0, 1]."""


class LiveDetector:
    """Scores images with a trained client; see `load_detector`.

    Args:
        opened: The client.
        rule: Its decision rule.
        product: Product that all images show, where it is known.
    """

    def __init__(self, opened: OpenedClient, rule: DecisionRule, product: str | None = None) -> None:
        self._opened, self._rule, self._product = opened, rule, product

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
        if isinstance(images, np.ndarray | Tensor):
            alone = images.ndim < 4
        else:
            alone = isinstance(images, str | os.PathLike) or not isinstance(images, Iterable)
        several: Any = [images] if alone else images
        scored = self._opened.scored(map(self._pixels, several), self._rule, self._product)
        return scored[0] if alone else scored

    def _pixels(self, image: Any) -> Tensor:
        """Reads or converts one image to the input of the model, float32 [C, H, W]."""
        if isinstance(image, str | os.PathLike):
            return self._opened.transform.image(expand_home(image))
        if isinstance(image, Tensor):
            image = _array(image)
        if isinstance(image, np.ndarray):
            grey = image.ndim == 2 or image.shape[2:] == (1,)
            if image.dtype != np.uint8 or not image.size or not (grey or image.shape[2:] == (3,)):
                raise UserError(
                    f"array of {image.dtype}, shape {list(image.shape)}: give uint8 [H, W] or [H, W, 3],"
                    " with values from 0 to 255"
                )
            image = Image.fromarray(image[:, :, 0] if image.shape[2:] == (1,) else image)
        if not isinstance(image, Image.Image):
            raise UserError(f"{type(image).__name__}: give a path, a PIL image, an array or a tensor")
        # A file that was only opened is read by its path: its header says what Pillow's pixels do not (white is zero).
        name, opened = os.fsdecode(getattr(image, "filename", "")), bool(getattr(image, "tile", ()))
        if name and opened and Path(name).is_file() and getattr(image, "n_frames", 1) == 1:
            return self._opened.transform.image(Path(name))
        _load(image)
        full = 65535 if image.mode.startswith(("I", "F")) else 255
        upright = Picture(ImageOps.exif_transpose(image), full)
        if words := caution(upright):
            warn_once(f"what is given as an image in memory {words}")
        return self._opened.transform.tensor(to_rgb(upright, Path("image in memory")))


def _load(image: Image.Image) -> None:
    """Decodes an image that was only opened; given its name, Pillow would map turned TIFF files wrongly into memory."""
    name = getattr(image, "filename", None)
    if name:
        image.filename = ""  # type: ignore[attr-defined]
    try:
        image.load()
    finally:
        if name:
            image.filename = name  # type: ignore[attr-defined]


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
    opened = open_client(str(given_path("run", run)), client, version)
    if opened.classifies:
        raise UserError(f"run={run}: it learned classes; lit-fedad predict writes them")
    return LiveDetector(opened, opened.rule(alpha, product), product)
