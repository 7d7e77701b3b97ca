"""A trained detector as one file that needs none of this package: pixels in, scores and decisions out."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from lit_fedad.contracts import Client, Prediction
from lit_fedad.contracts.randomness import generator
from lit_fedad.data.transform import ImageTransform
from lit_fedad.deployment.model_card import Facts, File, model_card
from lit_fedad.deployment.predict import choose_client, image_files
from lit_fedad.errors import UserError
from lit_fedad.evaluation.predict import predict_batch
from lit_fedad.experiment.build import image_transform
from lit_fedad.experiment.finished_run import complete_run, one_process, same_model
from lit_fedad.experiment.run_folder import RunFolder
from lit_fedad.report.console import Display
from lit_fedad.report.naming import human_bytes
from lit_fedad.tracking.tracker import amend

TOLERANCE = 1e-4
"""How far an exported detector may be from the live one, as a share of the largest value of an output."""

_RANDOM_BATCHES = (1, 3)
_BATCH = 4

# What every machine that loads the files can do.
_ANYWHERE = {"accelerator": "cpu", "precision": "32-true"}

Outputs = dict[str, Tensor]


class Detector(nn.Module):
    """What a client predicts, from pixels; normalises by itself.

    Args:
        client: A trained client, on the CPU.
        transform: Whose mean and deviation normalise.
        threshold: Above which image score the client calls an image anomalous; None for classifiers.
    """

    pixel_mean: Tensor
    pixel_std: Tensor
    threshold: Tensor

    def __init__(self, client: Client, transform: ImageTransform, threshold: float | None = None) -> None:
        super().__init__()
        self.client = client
        self.register_buffer("pixel_mean", torch.tensor(transform.mean).view(-1, 1, 1))
        self.register_buffer("pixel_std", torch.tensor(transform.std).view(-1, 1, 1))
        # In double precision, as thresholds are kept: a score beside its threshold must fall on the same side.
        self.register_buffer(
            "threshold", None if threshold is None else torch.tensor(threshold, dtype=torch.float64)
        )
        self.eval().requires_grad_(False)

    def normalise(self, pixels: Tensor) -> Tensor:
        """What the task sees."""
        return (pixels - self.pixel_mean) / self.pixel_std

    def judge(self, prediction: Prediction) -> Outputs:
        """The outputs by name: see `forward`."""
        if self.client.task.kind == "classification":
            assert prediction.logits is not None
            probabilities = prediction.logits.softmax(1)
            return {"probabilities": probabilities, "class": probabilities.argmax(1)}
        score, maps = prediction.image_score, prediction.anomaly_map
        localised = {} if maps is None else {"anomaly_map": maps}
        # A score that is no number is not called normal.
        return {"image_score": score, **localised, "decision": ~(score.double() <= self.threshold)}

    def forward(self, pixels: Tensor) -> Outputs:
        """Judges images.

        Args:
            pixels: Float32 in 0 .. 1 [B, C, S, S], at the run's image size.

        Returns:
            ``image_score`` [B], ``anomaly_map`` [B, S, S] of tasks that localise, and ``decision``, bool [B]; of
            classifiers ``probabilities`` [B, K] and ``class``, int64 [B].
        """
        return self.judge(self.client.predict_step({"image": self.normalise(pixels)}))


def export(
    run: str,
    client: int | None = None,
    formats: Sequence[str] = ("onnx", "pt2"),
    images: str | None = None,
    out: str | None = None,
    overrides: Mapping[str, str] | None = None,
) -> Path:
    """Writes a trained client's detector, its preprocessing and its model card, and checks what it wrote.

    The run's training images need not exist any more. Files compute in single precision, whatever the run did.

    Args:
        run: MLflow run id, or the run's folder.
        client: Whose detector; None for the client with most training images.
        formats: ``onnx``, ``pt2`` (`torch.export`), or both.
        images: Folder of images that live and exported detector are compared on, beside random ones.
        out: Where to write; None for ``export/client_N`` in the run's folder.
        overrides: Values that differ on this machine, such as ``backbone.weights``.

    Returns:
        The folder.

    Raises:
        UserError: If there is no such complete run, client, format or image, a format's packages are missing, the
            method's prediction cannot be written down as a graph, or a file computes something else than the client.
    """
    chosen = _chosen_formats(formats)
    folder, result, config = complete_run(run, overrides)
    number = choose_client(client, result["partition"]["sizes"])
    destination = Path(out) if out else folder.path / "export" / f"client_{number}"
    paths = image_files(Path(images), destination) if images else []
    fabric = one_process({**config, "fabric": _ANYWHERE})
    model = same_model(config, result)
    model.restore(folder.path, folder.config(), number, fabric)
    transform = image_transform(config)
    thresholds = {} if model.task.kind == "classification" else folder.thresholds()
    detector = Detector(model.client, transform, thresholds.get(number))
    program = trace(detector, transform)
    display = Display()
    try:
        destination.mkdir(parents=True, exist_ok=True)
        batches = chain(_random_pixels(transform, config["seed"]), _pixels(paths, transform))
        compared = ((pixels, _live(detector, pixels, fabric)) for pixels in batches)
        written = write(program, chosen, destination, compared)
        facts = Facts(
            result=result,
            config=config,
            client=number,
            thresholds=thresholds,
            preprocessing=preprocessing(transform),
            outputs=_shapes(program),
            files=written,
            compared=(sum(_RANDOM_BATCHES), len(paths)),
        )
        how = RunFolder(destination).save_json("preprocessing.json", facts.preprocessing)
        card = destination / "model_card.md"
        card.write_text(model_card(facts))
    except OSError as error:
        raise UserError(f"{error.filename or destination}: cannot be written ({error.strerror})") from error
    files = [*(destination / file.name for file in written), how, card]
    delivery = amend(folder.path, {}, config["rounds"], files, f"export/client_{number}")
    if delivery.pending:
        display.warn(
            f"{delivery.pending} tracking records are kept; send them: lit-fedad sync run={folder.path}"
        )
    for file in written:
        display.note(
            f"{file.name}: {human_bytes(file.size)}, at most {file.difference:.1e} from client {number}"
            f" on {facts.seen}"
        )
    display.where_next([("written", str(destination)), ("how to use", str(card))])
    return destination


def preprocessing(transform: ImageTransform) -> dict[str, Any]:
    """How an image file becomes the input: resizing is no graph operation, and stays outside."""
    return {
        "size": transform.size,
        "resize": transform.resize,
        "interpolation": "bicubic",
        "crop": None if transform.resize is None else "centre",
        "mode": "RGB" if transform.channels == 3 else "L",
        "range": [0, 1],
    }


def trace(detector: Detector, transform: ImageTransform) -> ExportedProgram:
    """Writes a detector down as a graph, for any number of images.

    Raises:
        UserError: If what the client predicts with cannot be written down.
    """
    example = torch.zeros(2, transform.channels, transform.size, transform.size)
    with torch.no_grad():
        detector(example)  # makes what a task makes once and keeps
    for tensor in (*detector.parameters(), *detector.buffers()):
        # What is a part of a message, or has its channels last, torch writes under a warning.
        tensor.data = tensor.data.clone(memory_format=torch.contiguous_format)
    try:
        # Without gradients, FedDyMem's head takes the faster of two ways by the number of patches, which a graph
        # does not know; nothing here requires any.
        with torch.enable_grad():
            program = torch.export.export(
                detector, (example,), dynamic_shapes={"pixels": {0: Dim("batch")}}, strict=True
            )
    except Exception as error:  # torch's tracers fail in many ways
        raise UserError(
            f"{type(detector.client).__name__}: its prediction cannot be exported ({_first_line(error)}); it may not"
            " branch on values of tensors"
        ) from error
    signature = program.graph_signature
    used = {*signature.inputs_to_parameters.values(), *signature.inputs_to_buffers.values()}
    for name in program.state_dict.keys() - used:  # such as a second, personal model
        del program.state_dict[name]
    return program


def write(
    program: ExportedProgram,
    formats: Sequence[str],
    folder: Path,
    compared: Iterable[tuple[Tensor, Outputs]],
) -> list[File]:
    """Writes a detector in each format; files that compute something else than the live detector are not kept.

    Args:
        program: From `trace`.
        formats: Keys of ``FORMATS``.
        folder: Where to.
        compared: Pixels, and what the live detector says of them.

    Raises:
        UserError: If a file computes something else, or ONNX lacks an operation.
    """
    drafts = {name: folder / f".partial.{name}" for name in formats}
    try:
        for name, draft in drafts.items():
            FORMATS[name].save(program, draft)
        exported = {name: FORMATS[name].load(draft) for name, draft in drafts.items()}
        found = [[difference(live, run(pixels)) for run in exported.values()] for pixels, live in compared]
        largest = torch.tensor(found).amax(0).tolist()  # NaN where there is any
        for name, share in zip(formats, largest, strict=True):
            if not share <= TOLERANCE:
                raise UserError(
                    f"format={name}: the exported detector differs from the live one by {share:.1e}, more than"
                    f" {TOLERANCE:g}; it is not kept"
                )
        kept = [draft.replace(folder / f"detector.{name}") for name, draft in drafts.items()]
    finally:
        for draft in drafts.values():
            draft.unlink(missing_ok=True)
    return [File(path.name, path.stat().st_size, share) for path, share in zip(kept, largest, strict=True)]


# ------------------------------------------------------------------------------------------------- formats


def save_pt2(program: ExportedProgram, path: Path) -> None:
    """Writes torch's own format."""
    torch.export.save(program, path)


def load_pt2(path: Path) -> Callable[[Tensor], Outputs]:
    """The detector in a file of torch's own format."""
    module = torch.export.load(path).module()
    return torch.no_grad()(module)


def _ranked(values: Tensor, *, stable: bool, dim: int = -1, descending: bool = False) -> Any:
    return torch.ops.aten.topk.default(values, values.shape[dim], dim, descending)


def _distances(rows: Tensor, others: Tensor, p: float = 2, compute_mode: int | None = None) -> Tensor:
    return torch.linalg.vector_norm(rows[:, None] - others, ord=p, dim=2)


# Operations without an ONNX counterpart, in other words; which of two equal values comes first does not matter.
_ONNX_LACKS: dict[Any, Callable] = {
    torch.ops.aten.sort.stable: _ranked,
    torch.ops.aten.cdist.default: _distances,
}


def save_onnx(program: ExportedProgram, path: Path) -> None:
    """Writes ONNX.

    Raises:
        UserError: If ONNX lacks an operation.
    """
    for name in ("onnxscript", "onnx_ir"):
        logging.getLogger(name).setLevel(logging.ERROR)  # they tell what they leave as it is
    try:
        onnx = torch.onnx.export(
            program.run_decompositions(_ONNX_LACKS),
            dynamo=True,
            input_names=["pixels"],
            output_names=list(_shapes(program)),
            dynamic_shapes={"pixels": {0: "batch"}},
            external_data=False,
            verbose=False,
        )
    except torch.onnx.OnnxExporterError as error:
        cause = _first_line(error.__cause__ or error)
        raise UserError(
            f"format=onnx: ONNX lacks what the detector computes ({cause}); give format=pt2"
        ) from error
    assert onnx is not None
    onnx.save(path)


def load_onnx(path: Path) -> Callable[[Tensor], Outputs]:
    """The detector in an ONNX file, under onnxruntime on the CPU."""
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]

    def run(pixels: Tensor) -> Outputs:
        values = session.run(names, {"pixels": pixels.numpy()})
        return {name: torch.from_numpy(value) for name, value in zip(names, values, strict=True)}

    return run


class Format(NamedTuple):
    """How a detector is kept.

    Attributes:
        save: Writes the graph to a file.
        load: What is in a file, from pixels to outputs.
        needs: Packages beyond those of this one.
    """

    save: Callable[[ExportedProgram, Path], None]
    load: Callable[[Path], Callable[[Tensor], Outputs]]
    needs: tuple[str, ...] = ()


FORMATS = {
    "onnx": Format(save_onnx, load_onnx, ("onnx", "onnxscript", "onnxruntime")),
    "pt2": Format(save_pt2, load_pt2),
}


def _chosen_formats(formats: Sequence[str]) -> list[str]:
    chosen = list(dict.fromkeys(formats))
    for name in chosen or [""]:
        if name not in FORMATS:
            raise UserError(f"format={','.join(formats)}: '{name}' is none of {', '.join(FORMATS)}")
        if missing := [package for package in FORMATS[name].needs if find_spec(package) is None]:
            raise UserError(
                f"format={name} needs more packages: pip install {' '.join(missing)}; or give format=pt2"
            )
    return chosen


def _shapes(program: ExportedProgram) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the outputs, less the number of images."""
    spec = program.call_spec.out_spec
    values = [node.meta["val"] for node in program.graph.output_node().args[0]]  # type: ignore[union-attr]
    assert spec is not None
    return {name: tuple(value.shape[1:]) for name, value in spec.unflatten(values).items()}


# --------------------------------------------------------------------------------------------- comparison


def difference(live: Mapping[str, Tensor], exported: Mapping[str, Tensor]) -> float:
    """How far an exported detector is from the live one, as a share of the largest value of an output.

    Args:
        live: Outputs of one batch; whole numbers and decisions, which follow from the others, do not count.
        exported: The same of the exported detector.

    Example:
        >>> live = {"image_score": torch.tensor([4.0, 2.0]), "decision": torch.tensor([True, False])}
        >>> difference(live, {"image_score": torch.tensor([4.0, 2.5]), "decision": torch.tensor([True, True])})
        0.125
    """
    shares = [
        (exported[name] - output).abs().max() / output.abs().max().clamp(min=torch.finfo(output.dtype).tiny)
        for name, output in live.items()
        if output.is_floating_point()
    ]
    return float(torch.stack(shares).max())


def _live(detector: Detector, pixels: Tensor, fabric: Fabric) -> Outputs:
    """What the live client says, the way a run asks it."""
    batch = {"image": detector.normalise(pixels)}
    return detector.judge(predict_batch(detector.client, batch, fabric))


def _random_pixels(transform: ImageTransform, seed: int) -> Iterator[Tensor]:
    """Batches of several sizes, one image among them: the graph must not depend on how many there are."""
    draw = generator(seed, "export")
    for size in _RANDOM_BATCHES:
        yield torch.rand(size, transform.channels, transform.size, transform.size, generator=draw)


def _pixels(paths: Sequence[Path], transform: ImageTransform) -> Iterator[Tensor]:
    """Batches of image files."""
    plain = replace(transform, mean=(0,), std=(1,))
    for start in range(0, len(paths), _BATCH):
        yield torch.stack([plain.image(path) for path in paths[start : start + _BATCH]])


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), "") or type(error).__name__
