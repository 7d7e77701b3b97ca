"""Exports a trained detector as one file that needs none of this package: pixels in, scores and decisions out."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lightning.fabric import Fabric
from torch import Tensor
from torch.export import ExportedProgram

from lit_fedad.contracts.randomness import generator
from lit_fedad.core.client_names import ClientNames
from lit_fedad.core.errors import UserError
from lit_fedad.core.files import atomic, unwritable_in_one_line
from lit_fedad.data.transform import ImageTransform
from lit_fedad.deployment.detector import Detector, Outputs, output_shapes, trace
from lit_fedad.deployment.exported import SHEET, write_sheet
from lit_fedad.deployment.formats import FORMATS, MOST_IMAGES, check_formats
from lit_fedad.deployment.live_detector import open_client
from lit_fedad.deployment.model_card import DetectorFile, Facts, OnImages, model_card
from lit_fedad.deployment.predict import image_files
from lit_fedad.evaluation.predict import predict_batch
from lit_fedad.experiment.claim import ELSEWHERE, locked
from lit_fedad.experiment.run_files import save_json
from lit_fedad.report.console import Display
from lit_fedad.report.naming import human_bytes, named_version
from lit_fedad.tracking.tracker import amend

TOLERANCE = 1e-4
"""Largest difference of an exact format's file from the live detector, as a share of the largest value of an output."""


class Compared(NamedTuple):
    """A batch that files are compared on.

    Attributes:
        pixels: Float32 in 0 .. 1 [B, C, H, W].
        live: The live detector's outputs.
        real: Whether they are images, not random numbers.
    """

    pixels: Tensor
    live: Outputs
    real: bool


def write_checked(
    program: ExportedProgram,
    formats: Sequence[str],
    folder: Path,
    compared: Iterable[Compared],
    normal: Sequence[Tensor] = (),
) -> list[DetectorFile]:
    """Writes a detector in each format; keeps no file if one of them differs from the live detector.

    Args:
        program: The graph, from `lit_fedad.deployment.detector.trace`.
        formats: Keys of `FORMATS`.
        folder: Folder to write to.
        compared: Batches, at least one.
        normal: Pixels of normal images, each [1, C, H, W], for formats that need them.

    Returns:
        What was written.

    Raises:
        UserError: If a file of an exact format differs by more than `TOLERANCE`, one gives no numbers, or ONNX lacks
            an operation.
    """
    drafts = {name: folder / f".partial.{name}" for name in formats}
    try:
        for name, draft in drafts.items():
            shutil.rmtree(draft, ignore_errors=True)
            draft.mkdir(parents=True)
            form = FORMATS[name]
            form.save(program, draft / form.files[0], *([normal] if form.by_images else []))
        exported = {
            name: FORMATS[name].load(draft / FORMATS[name].files[0]) for name, draft in drafts.items()
        }
        shares: dict[str, list[float]] = {name: [] for name in formats}
        image_outputs: dict[str, list[tuple[Outputs, Outputs]]] = {name: [] for name in formats}
        for batch in compared:
            for name, run in exported.items():
                outputs = run(batch.pixels)
                shares[name].append(difference(batch.live, outputs))
                if batch.real:
                    image_outputs[name].append((_of_images(batch.live), _of_images(outputs)))
        written = []
        for name, draft in drafts.items():
            form, share = FORMATS[name], float(torch.tensor(shares[name]).max())  # NaN if any is
            limit = TOLERANCE if form.exact else torch.finfo(torch.float32).max
            if not share <= limit:
                raise UserError(
                    f"format={name}: the exported detector differs from the live one by {share:.1e}, more than"
                    f" {limit:g}; it is not kept"
                )
            size = sum((draft / file).stat().st_size for file in form.files)
            written.append(DetectorFile(form.files, size, share, on_images(image_outputs[name])))
        for name, draft in drafts.items():
            for file in FORMATS[name].files:
                (draft / file).replace(folder / file)
    finally:
        for draft in drafts.values():
            shutil.rmtree(draft, ignore_errors=True)
    return written


def on_images(pairs: Sequence[tuple[Outputs, Outputs]]) -> OnImages | None:
    """Compares what detectors say of images.

    Args:
        pairs: Outputs of the live and of the exported detector.

    Returns:
        Differences and changed decisions; None without images.

    Example:
        >>> live = {"image_score": torch.tensor([4.0, 2.0]), "decision": torch.tensor([True, False])}
        >>> on_images([(live, {**live, "image_score": torch.tensor([4.0, 2.5])})])
        OnImages(images=2, median=0.0, largest=0.25, changed=0)
    """
    if not pairs:
        return None
    score, decision = ("probabilities", "class") if "class" in pairs[0][0] else ("image_score", "decision")
    expected, computed = (torch.cat([pair[side][score] for pair in pairs]) for side in (0, 1))
    expected, computed = expected.view(len(expected), -1), computed.view(len(computed), -1)
    tiny = torch.finfo(expected.dtype).tiny
    shares = (computed - expected).abs().amax(1) / expected.abs().amax(1).clamp(min=tiny)
    changed = sum(int((live[decision] != exported[decision]).sum()) for live, exported in pairs)
    return OnImages(len(expected), float(shares.median()), float(shares.max()), changed)


def _of_images(outputs: Outputs) -> Outputs:
    """Leaves out the anomaly map, which is large."""
    return {name: output for name, output in outputs.items() if name != "anomaly_map"}


def difference(live: Mapping[str, Tensor], exported: Mapping[str, Tensor]) -> float:
    """Computes the difference of an exported detector from the live one.

    Args:
        live: Outputs for one batch; whole numbers, decisions and p-values, which follow from the others by comparisons,
            are not compared.
        exported: Outputs of the exported detector for the same batch.

    Returns:
        The largest absolute difference of an output as a share of its largest absolute value; NaN if an output holds
        NaN.

    Example:
        >>> live = {"image_score": torch.tensor([4.0, 2.0]), "decision": torch.tensor([True, False])}
        >>> difference(live, {"image_score": torch.tensor([4.0, 2.5]), "decision": torch.tensor([True, True])})
        0.125
    """
    shares = [
        (exported[name] - output).abs().max() / output.abs().max().clamp(min=torch.finfo(output.dtype).tiny)
        for name, output in live.items()
        if output.is_floating_point() and name != "p_value"
    ]
    return float(torch.stack(shares).max())


_RANDOM_BATCHES = (1, 3)
_BATCH = 4

_TURN_S = 10.0
"""Longest wait for a command that writes to the run's record, such as a watch, in seconds."""

# Every machine that loads the files can do this.
_ANYWHERE = {"accelerator": "cpu", "precision": "32-true"}


def export(
    run: str,
    client: int | str | None = None,
    format: tuple[str, ...] = ("onnx", "pt2"),
    images: str | None = None,
    out: str | None = None,
    product: str | None = None,
    version: int | None = None,
    normal: str | None = None,
    overrides: Mapping[str, str] | None = None,
) -> Path:
    """Writes a trained detector with its decision rule and model card, and checks it against the live one.

    The run's training images need not exist any more. Files compute in single precision, whatever the run did.

    Args:
        run: MLflow run id, or the run's folder.
        client: Number of the client, or name of the site; None for the client with most training images.
        format: Of onnx, pt2, openvino and openvino_int8.
        images: Folder of images that live and exported detector are compared on, beside random ones.
        out: Folder to write to; None for ``export/client_N`` in the run's folder.
        product: Product that all images show, where it is known: it chooses the calibration scores.
        version: Number of the detector's version: 0 as it was trained, None for the default.
        normal: Folder of the client's normal images, which choose the ranges of ``openvino_int8``.
        overrides: Values that differ on this machine, such as ``backbone.weights``.

    Returns:
        The folder.

    Raises:
        UserError: If there is no such complete run, client, format or image, a format's packages are missing, the
            method's prediction cannot be written down as a graph, a file computes something else than the client, or
            another command writes to the folder.
    """
    chosen = check_formats(format)
    opened = open_client(run, client, version, overrides, _ANYWHERE)
    opened.check_options(product=product)
    folder, result, config, transform = opened.folder, opened.result, opened.config, opened.transform
    number, label = opened.number, ClientNames.of(result).label(opened.number)
    rules = {holder: opened.rule(product=product, client=holder) for holder in opened.calibration.clients}
    destination = Path(out) if out else folder.path / "export" / f"client_{label}"
    display = Display()
    paths = image_files(Path(images), display) if images else []
    normal_paths = _normal_images(chosen, normal, display)
    detector = Detector(opened.client, transform, rules.get(number))
    program = trace(detector, transform)
    # Two calls at once would write into one another's drafts.
    with (
        unwritable_in_one_line(destination, within=True),
        locked(destination, advice="" if out else ELSEWHERE),
    ):
        batches = chain(
            ((pixels, False) for pixels in _random_pixels(transform, config["seed"])),
            ((pixels, True) for pixels in _pixels(paths, transform, _BATCH)),
        )
        compared = (
            Compared(pixels, _live(detector, pixels, opened.fabric), real) for pixels, real in batches
        )
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
        preprocessing_file = save_json(destination, "preprocessing.json", facts.preprocessing)
        listed = write_sheet(destination, facts).sha256.keys()
        other_files = [form.files for name, form in FORMATS.items() if name not in chosen]
        earlier_files = [files for files in other_files if listed >= {*files}]
        sizes = {
            files[0]: sum((destination / file).stat().st_size for file in files) for files in earlier_files
        }
        facts = replace(facts, earlier=sizes)
        card = destination / "model_card.md"
        with atomic(card) as partial:
            partial.write_text(model_card(facts))
    files = [
        *(destination / name for file in written for name in file.files),
        preprocessing_file,
        destination / SHEET,
        card,
    ]
    prefix, home = folder.place(f"export/client_{label}"), folder.home.path
    try:
        with locked(home, _TURN_S):
            display.unsent(amend(home, {}, config["rounds"], files, prefix).kept, home)
    except UserError as error:  # the files are complete all the same
        display.warn(f"not tracked: {error}")
    for file in written:
        display.note(
            f"{file.files[0]}: {human_bytes(file.size)}, within {file.difference:.1e} of the outputs of"
            f" {opened.title}{named_version(result)} on {facts.compared_images}{_on_images(file)}"
        )
    display.where_next([("written", str(destination)), ("how to use", str(card))])
    return destination


def preprocessing(transform: ImageTransform) -> dict[str, Any]:
    """Describes, for ``preprocessing.json``, how a file becomes the input: resizing is no operation of the graph."""
    return {
        "size": transform.size,
        "fit": transform.fit,
        "resize": transform.resize,
        "interpolation": "bicubic",
        "mode": "RGB" if transform.channels == 3 else "L",
        "range": [0, 1],
        **({} if transform.page is None else {"page": transform.page}),
    }


def _live(detector: Detector, pixels: Tensor, fabric: Fabric) -> Outputs:
    """Predicts as an evaluation of the run does."""
    batch = {"image": detector.normalise(pixels)}
    return detector.outputs(predict_batch(detector.client, batch, fabric))


def _random_pixels(transform: ImageTransform, seed: int) -> Iterator[Tensor]:
    """Draws batches of several sizes, among them one image: the graph must not depend on the number of images."""
    rng = generator(seed, "export")
    for size in _RANDOM_BATCHES:
        yield torch.rand(size, transform.channels, *transform.shape, generator=rng)


def _pixels(paths: Sequence[Path], transform: ImageTransform, batch: int) -> Iterator[Tensor]:
    """Reads image files in batches, without normalising them."""
    plain = replace(transform, mean=(0,), std=(1,))
    for start in range(0, len(paths), batch):
        yield torch.stack([plain.image(path) for path in paths[start : start + batch]])


def _normal_images(formats: Sequence[str], folder: str | None, display: Display) -> list[Path]:
    """Lists normal images for the formats that need some, evenly over all where they are many."""
    if not any(FORMATS[name].by_images for name in formats):
        if folder is not None:
            raise UserError(f"normal={folder}: only format=openvino_int8 looks at normal images")
        return []
    if folder is None:
        raise UserError("format=openvino_int8 needs normal=FOLDER, normal images of the client")
    paths = image_files(Path(folder), display)
    return paths[:: -(-len(paths) // MOST_IMAGES)]


def _on_images(file: DetectorFile) -> str:
    compared = file.on_images
    if compared is None:
        return ""
    return (
        f"; image scores of files differ by {compared.median:.1e} (median; at most {compared.largest:.1e}),"
        f" decisions by {compared.changed} of {compared.images}"
    )
