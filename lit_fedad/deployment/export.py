"""Exports a trained detector as one file that needs none of this package: pixels in, scores and decisions out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from lightning.fabric import Fabric
from torch import Tensor

from lit_fedad.client_names import ClientNames
from lit_fedad.contracts.randomness import generator
from lit_fedad.data.transform import ImageTransform
from lit_fedad.deployment.checked_files import Compared, write_checked
from lit_fedad.deployment.decision_rule import decision_rule
from lit_fedad.deployment.detector import Detector, Outputs, output_shapes, trace
from lit_fedad.deployment.detector_sheet import write_sheet
from lit_fedad.deployment.formats import FORMATS, check_formats
from lit_fedad.deployment.model_card import DetectorFile, Facts, model_card
from lit_fedad.deployment.openvino_files import MOST_IMAGES
from lit_fedad.deployment.predict import choose_client, image_files, named_version
from lit_fedad.errors import UserError
from lit_fedad.evaluation.predict import predict_batch
from lit_fedad.experiment.calibration import alphas
from lit_fedad.experiment.finished_run import complete_run, one_process, same_model
from lit_fedad.experiment.geometry import image_transform
from lit_fedad.experiment.run_folder import RunFolder
from lit_fedad.experiment.trained_client import load_client
from lit_fedad.metrics.conformal import Calibration
from lit_fedad.report.console import Display
from lit_fedad.report.naming import human_bytes
from lit_fedad.tracking.tracker import amend

_RANDOM_BATCHES = (1, 3)
_BATCH = 4

# What every machine that loads the files can do.
_ANYWHERE = {"accelerator": "cpu", "precision": "32-true"}


def export(
    run: str,
    client: int | str | None = None,
    formats: Sequence[str] = ("onnx", "pt2"),
    images: str | None = None,
    out: str | None = None,
    product: str | None = None,
    version: int | None = None,
    normal: str | None = None,
    overrides: Mapping[str, str] | None = None,
) -> Path:
    """Writes a trained client's detector, its preprocessing and its model card, and checks what it wrote.

    The run's training images need not exist any more. Files compute in single precision, whatever the run did.

    Args:
        run: MLflow run id, or the run's folder.
        client: Number of the client, or name of the site; None for the client with most training images.
        formats: Keys of `FORMATS`.
        images: Folder of images that live and exported detector are compared on, beside random ones.
        out: Folder to write to; None for ``export/client_N`` in the run's folder.
        product: Product that all images show, where it is known: it chooses the calibration scores.
        version: Number of the detector's version: 0 as it was trained, None for the newest.
        normal: Folder of the client's normal images, which choose the ranges of ``openvino_int8``.
        overrides: Values that differ on this machine, such as ``backbone.weights``.

    Returns:
        The folder.

    Raises:
        UserError: If there is no such complete run, client, format or image, a format's packages are missing, the
            method's prediction cannot be written down as a graph, or a file computes something else than the client.
    """
    chosen = check_formats(formats)
    folder, result, config = complete_run(run, overrides, version)
    model = same_model(config, result)
    classifies = model.task.kind == "classification"
    calibration = Calibration({}, shared=False) if classifies else folder.calibration()
    number, names = choose_client(client, result, calibration.clients), ClientNames.of(result)
    rules = {n: decision_rule(calibration, n, alphas(config)[0], product) for n in calibration.clients}
    destination = Path(out) if out else folder.path / "export" / f"client_{names.label(number)}"
    paths = image_files(Path(images), destination) if images else []
    normal_paths = _normal_images(chosen, normal, destination)
    fabric = one_process({**config, "fabric": _ANYWHERE})
    load_client(model, folder.path, folder.config(), number, fabric, result.get("own_client"))
    transform = image_transform(config, model.task)
    detector = Detector(model.client, transform, rules.get(number))
    program = trace(detector, transform)
    display = Display()
    try:
        destination.mkdir(parents=True, exist_ok=True)
        batches = chain(
            ((pixels, False) for pixels in _random_pixels(transform, config["seed"])),
            ((pixels, True) for pixels in _pixels(paths, transform, _BATCH)),
        )
        compared = (Compared(pixels, _live(detector, pixels, fabric), real) for pixels, real in batches)
        ranges = list(_pixels(normal_paths, transform, 1))
        written = write_checked(program, chosen, destination, compared, ranges)
        facts = Facts(
            result=result,
            config=config,
            client=number,
            rules=rules,
            preprocessing=preprocessing(transform),
            outputs=output_shapes(program),
            files=written,
            compared=(sum(_RANDOM_BATCHES), len(paths)),
            normal=len(normal_paths),
        )
        how = RunFolder(destination).save_json("preprocessing.json", facts.preprocessing)
        sheet = write_sheet(destination, facts)
        card = destination / "model_card.md"
        card.write_text(model_card(facts))
    except OSError as error:
        raise UserError(f"{error.filename or destination}: cannot be written ({error.strerror})") from error
    files = [*(destination / name for file in written for name in file.files), how, sheet, card]
    place = folder.place(f"export/client_{names.label(number)}")
    delivery = amend(folder.home.path, {}, config["rounds"], files, place)
    display.unsent(delivery.pending, folder.home.path)
    for file in written:
        display.note(
            f"{file.name}: {human_bytes(file.size)}, at most {file.difference:.1e} from"
            f" {names.title(number)}{named_version(result)} on {facts.compared_images}{_on_images(file)}"
        )
    display.where_next([("written", str(destination)), ("how to use", str(card))])
    return destination


def preprocessing(transform: ImageTransform) -> dict[str, Any]:
    """Describes how an image file becomes the input: resizing is no operation of the graph.

    Args:
        transform: The run's transform.

    Returns:
        Content of ``preprocessing.json``.
    """
    return {
        "size": transform.size,
        "fit": transform.fit,
        "resize": transform.resize,
        "interpolation": "bicubic",
        "mode": "RGB" if transform.channels == 3 else "L",
        "range": [0, 1],
    }


def _live(detector: Detector, pixels: Tensor, fabric: Fabric) -> Outputs:
    """Predicts as an evaluation of the run does."""
    batch = {"image": detector.normalise(pixels)}
    return detector.outputs(predict_batch(detector.client, batch, fabric))


def _random_pixels(transform: ImageTransform, seed: int) -> Iterator[Tensor]:
    """Draws batches of several sizes, one image among them: the graph must not depend on their number."""
    draw = generator(seed, "export")
    for size in _RANDOM_BATCHES:
        yield torch.rand(size, transform.channels, *transform.shape, generator=draw)


def _pixels(paths: Sequence[Path], transform: ImageTransform, batch: int) -> Iterator[Tensor]:
    """Reads image files in batches, without normalising them."""
    plain = replace(transform, mean=(0,), std=(1,))
    for start in range(0, len(paths), batch):
        yield torch.stack([plain.image(path) for path in paths[start : start + batch]])


def _normal_images(formats: Sequence[str], folder: str | None, out: Path) -> list[Path]:
    """Lists normal images for the formats that need some, evenly over all where they are many."""
    if not any(FORMATS[name].by_images for name in formats):
        if folder is not None:
            raise UserError(f"normal={folder}: only format=openvino_int8 looks at normal images")
        return []
    if folder is None:
        raise UserError("format=openvino_int8 needs normal=FOLDER, normal images of the client")
    paths = image_files(Path(folder), out)
    return paths[:: -(-len(paths) // MOST_IMAGES)]


def _on_images(file: DetectorFile) -> str:
    seen = file.on_images
    if seen is None:
        return ""
    return (
        f"; image scores of files differ by {seen.median:.1e} (median; at most {seen.largest:.1e}), decisions by"
        f" {seen.changed} of {seen.images}"
    )
