"""A client's detector as a module and a graph, and its files: PyTorch's own, ONNX, and OpenVINO."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from lit_fedad.contracts import Client, Prediction
from lit_fedad.core.errors import UserError, first_line
from lit_fedad.core.extras import EXTRAS, install
from lit_fedad.data.transform import ImageTransform
from lit_fedad.metrics.conformal import DecisionRule

Outputs = dict[str, Tensor]


class Detector(nn.Module):
    """Module that predicts what a client predicts, from pixels that are not normalised.

    Args:
        client: A trained client, on the CPU.
        transform: Its mean and deviation normalise pixels.
        rule: The client's decision rule; None for classifiers.
    """

    pixel_mean: Tensor
    pixel_std: Tensor
    threshold: Tensor
    edges: Tensor
    ranks: Tensor

    def __init__(self, client: Client, transform: ImageTransform, rule: DecisionRule | None = None) -> None:
        super().__init__()
        self.client = client
        self.register_buffer("pixel_mean", torch.tensor(transform.mean).view(-1, 1, 1))
        self.register_buffer("pixel_std", torch.tensor(transform.std).view(-1, 1, 1))
        if rule is not None:
            self.register_buffer("threshold", torch.tensor(rule.threshold))
            # One edge that no score lies below: a graph of an empty tensor is none.
            self.register_buffer("edges", torch.cat([torch.tensor([-torch.inf]), rule.scores.edges]))
            counts = torch.cat([torch.zeros(1), rule.scores.counts.float()])
            self.register_buffer("ranks", counts / (rule.scores.total + 1))
            self.smallest = 1 / (rule.scores.total + 1)
        self.eval().requires_grad_(False)

    def normalise(self, pixels: Tensor) -> Tensor:
        """Normalises pixels to the input of the task.

        Args:
            pixels: Float32 in 0 .. 1 [B, C, H, W].

        Returns:
            Images [B, C, H, W].
        """
        return (pixels - self.pixel_mean) / self.pixel_std

    def outputs(self, prediction: Prediction) -> Outputs:
        """Names the outputs of a prediction.

        Args:
            prediction: Prediction of the client.

        Returns:
            The same as `forward`.
        """
        if self.client.task.kind == "classification":
            assert prediction.logits is not None
            probabilities = prediction.logits.softmax(1)
            return {"probabilities": probabilities, "class": probabilities.argmax(1)}
        score, maps = prediction.image_score, prediction.anomaly_map
        localised = {} if maps is None else {"anomaly_map": maps}
        p_value = self.smallest + (self.edges >= score[:, None]).float() @ self.ranks
        # A score that is no number is not called normal.
        decision = ~(score <= self.threshold)
        return {"image_score": score, **localised, "p_value": p_value, "decision": decision}

    def forward(self, pixels: Tensor) -> Outputs:
        """Predicts images.

        Args:
            pixels: Float32 in 0 .. 1 [B, C, H, W], at the run's image size.

        Returns:
            ``image_score`` [B], ``anomaly_map`` [B, H, W] of tasks that localise, ``p_value`` [B] and ``decision``,
            bool [B]; of classifiers ``probabilities`` [B, K] and ``class``, int64 [B].
        """
        return self.outputs(self.client.predict_step({"image": self.normalise(pixels)}))


def trace(detector: Detector, transform: ImageTransform) -> ExportedProgram:
    """Traces a detector into a graph, for any number of images.

    Args:
        detector: The detector.
        transform: Gives number of channels and size of the images.

    Returns:
        The graph, with the parameters and buffers that it uses.

    Raises:
        UserError: If the client's prediction cannot be traced.
    """
    example = torch.zeros(2, transform.channels, *transform.shape)
    with torch.no_grad():
        detector(example)  # makes what a task makes once and keeps
    for tensor in (*detector.parameters(), *detector.buffers()):
        # Torch warns of views into a message and of tensors with their channels last.
        tensor.data = tensor.data.clone(memory_format=torch.contiguous_format)
    try:
        program = _exported(detector, example, strict=False)
    except (
        Exception
    ):  # such as of a task that calls `len`, which fixes the number of images; strict takes twice as long
        try:
            program = _exported(detector, example, strict=True)
        except Exception as error:  # torch's tracers fail in many ways
            raise UserError(
                f"{type(detector.client).__name__}: its prediction cannot be exported ({first_line(error)}); it may"
                " not branch on values of tensors"
            ) from error
    signature = program.graph_signature
    used = {*signature.inputs_to_parameters.values(), *signature.inputs_to_buffers.values()}
    for name in program.state_dict.keys() - used:  # such as a second, personal model
        del program.state_dict[name]
    return program


def _exported(detector: Detector, example: Tensor, strict: bool) -> ExportedProgram:
    # Without gradients, FedDyMem's head takes the faster of two ways by the number of patches, which a graph does not
    # know; nothing here requires any.
    with torch.enable_grad():
        return torch.export.export(
            detector, (example,), dynamic_shapes={"pixels": {0: Dim("batch")}}, strict=strict
        )


def output_shapes(program: ExportedProgram) -> dict[str, tuple[int, ...]]:
    """Lists names and shapes of a graph's outputs.

    Args:
        program: The graph, from `trace`.

    Returns:
        Shapes without the number of images, by name.
    """
    spec = program.call_spec.out_spec
    values = [node.meta["val"] for node in program.graph.output_node().args[0]]  # type: ignore[union-attr]
    assert spec is not None
    return {name: tuple(value.shape[1:]) for name, value in spec.unflatten(values).items()}


def _sorted(values: Tensor, *, stable: bool, dim: int = -1, descending: bool = False) -> Any:
    return torch.ops.aten.topk.default(values, values.shape[dim], dim, descending)


def _distances(points: Tensor, others: Tensor, p: float = 2, compute_mode: int | None = None) -> Tensor:
    return torch.linalg.vector_norm(points[:, None] - others, ord=p, dim=2)


# Replacements of operations that ONNX does not have; which of two equal values comes first does not matter.
_ONNX_LACKS: dict[Any, Callable] = {
    torch.ops.aten.sort.stable: _sorted,
    torch.ops.aten.cdist.default: _distances,
}


def _save_onnx(program: ExportedProgram, path: Path) -> None:
    """Writes a graph as ONNX; refuses one with an operation that ONNX lacks."""
    for name in ("onnxscript", "onnx_ir"):
        logging.getLogger(name).setLevel(logging.ERROR)  # they log what they leave as it is
    try:
        try:
            onnx = _onnx(program)
        except torch.onnx.OnnxExporterError:  # only now, as it takes as long as tracing
            onnx = _onnx(program.run_decompositions(_ONNX_LACKS))
    except torch.onnx.OnnxExporterError as error:
        cause = first_line(error.__cause__ or error)
        raise UserError(
            f"format=onnx: ONNX lacks what the detector computes ({cause}); give format=pt2"
        ) from error
    onnx.save(path)


def _onnx(program: ExportedProgram) -> torch.onnx.ONNXProgram:
    onnx = torch.onnx.export(
        program,
        dynamo=True,
        input_names=["pixels"],
        output_names=list(output_shapes(program)),
        dynamic_shapes={"pixels": {0: "batch"}},
        external_data=False,
        verbose=False,
    )
    assert onnx is not None
    return onnx


def _load_onnx(path: Path) -> Callable[[Tensor], Outputs]:
    """Reads a detector in ONNX, to be computed by onnxruntime on the CPU."""
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]

    def run(pixels: Tensor) -> Outputs:
        values = session.run(names, {"pixels": pixels.numpy()})
        return {name: torch.from_numpy(value) for name, value in zip(names, values, strict=True)}

    return run


MOST_IMAGES = 300
"""Number of normal images by which ranges of eight-bit numbers are chosen, as nncf's default."""

# Single precision on every CPU: some would take bfloat16 by themselves.
_CPU = {"INFERENCE_PRECISION_HINT": "f32"}


def _save_openvino(program: ExportedProgram, path: Path) -> None:
    """Writes a graph for OpenVINO, the network's weights in half precision; all computes in single precision.

    Bank, subspace, threshold and calibration scores stay as they are. Weights go to ``.bin`` beside ``.xml``.
    """
    import openvino

    model = _read(program)
    _halve(model, _network(model))
    openvino.save_model(model, path, compress_to_fp16=False)


def _save_int8(program: ExportedProgram, path: Path, normal: Sequence[Tensor]) -> None:
    """Writes a graph for OpenVINO whose network computes in eight bits, by post-training quantisation (NNCF).

    What follows it stays in single precision: distances to a bank or subspace, smoothing, decisions. The first
    `MOST_IMAGES` normal images choose the ranges.
    """
    os.environ.setdefault("NNCF_CI", "1")  # otherwise nncf reports its use to its makers
    import nncf
    import openvino

    model = _read(program)
    network = _network(model)
    names = [node.get_friendly_name() for node in model.get_ordered_ops()]
    kept = nncf.IgnoredScope(names=[name for name in names if name not in network], validate=False)
    transforms = any(node.get_type_name() == "Gelu" for node in model.get_ordered_ops())
    nncf.set_log_level(logging.ERROR)
    quantised = nncf.quantize(
        model,
        nncf.Dataset([pixels.numpy() for pixels in normal[:MOST_IMAGES]]),
        subset_size=MOST_IMAGES,
        ignored_scope=kept,
        model_type=nncf.ModelType.TRANSFORMER if transforms else None,
    )
    openvino.save_model(quantised, path, compress_to_fp16=False)


def _load_openvino(path: Path) -> Callable[[Tensor], Outputs]:
    """Reads a detector for OpenVINO, to be computed on the CPU."""
    import openvino

    compiled = openvino.compile_model(path, "CPU", _CPU)

    def run(pixels: Tensor) -> Outputs:
        values = compiled(pixels.numpy())
        return {output.any_name: torch.from_numpy(np.array(value)) for output, value in values.items()}

    return run


def _read(program: ExportedProgram) -> Any:
    """Reads a graph by way of ONNX: OpenVINO's own converter reports its use to its makers, its reader does not."""
    import openvino

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "detector.onnx"
        _save_onnx(program, path)
        return openvino.Core().read_model(path)


def _network(model: Any) -> set[str]:
    """Names the operations that a convolution or the hidden layer of a transformer's block depends on, and those.

    What lies behind them is a detector's own: small differences of large numbers, which no coarse number may enter.
    """
    last = ("Convolution", "GroupConvolution", "Gelu")
    waiting = [node for node in model.get_ordered_ops() if node.get_type_name() in last]
    found: set[str] = set()
    while waiting:
        node = waiting.pop()
        if node.get_friendly_name() not in found:
            found.add(node.get_friendly_name())
            waiting.extend(value.get_source_output().get_node() for value in node.inputs())
    return found


def _halve(model: Any, names: set[str]) -> None:
    """Stores weights in half precision, of the operations of these names."""
    from openvino import opset13 as operations

    most = np.finfo(np.float16).max
    for node in model.get_ordered_ops():
        if node.get_friendly_name() not in names or node.get_type_name() != "Constant":
            continue
        if node.get_element_type().get_type_name() == "f32" and np.abs(node.data).max() <= most:
            half = operations.constant(node.data.astype(np.float16))
            node.output(0).replace(operations.convert(half, "f32").output(0))


class Format(NamedTuple):
    """A file format.

    Attributes:
        files: Names of its files; the first is read, and needs the others beside it.
        save: Writes a graph to the first file; where the format has eight-bit numbers, by pixels of normal images.
        load: Reads the first file into a function from pixels [B, C, S, S] to outputs.
        extra: Extra of this package that it needs.
        exact: Whether it computes what the live detector does, up to the order of sums.
        by_images: Whether `save` is given the pixels of normal images, each [1, C, H, W].
    """

    files: tuple[str, ...]
    save: Callable[..., None]
    load: Callable[[Path], Callable[[Tensor], Outputs]]
    extra: str | None = None
    exact: bool = True
    by_images: bool = False


def check_formats(formats: Sequence[str]) -> list[str]:
    """Checks names of formats.

    Args:
        formats: Keys of `FORMATS`.

    Returns:
        The names, each once.

    Raises:
        UserError: For an unknown format, one whose packages are missing, or no format.
    """
    chosen = list(dict.fromkeys(formats))
    for name in chosen or [""]:
        if name not in FORMATS:
            raise UserError(f"format={','.join(formats)}: '{name}' is none of {', '.join(FORMATS)}")
        extra = FORMATS[name].extra
        if extra and (missing := [package for package in EXTRAS[extra] if find_spec(package) is None]):
            raise UserError(f"format={name} needs {', '.join(missing)}: {install(extra)}; or give format=pt2")
    return chosen


def _load_pt2(path: Path) -> Callable[[Tensor], Outputs]:
    """Reads a detector in the format of `torch.export`."""
    module = torch.export.load(path).module()
    return torch.no_grad()(module)


FORMATS = {
    "onnx": Format(("detector.onnx",), _save_onnx, _load_onnx, "export"),
    "pt2": Format(("detector.pt2",), torch.export.save, _load_pt2),
    "openvino": Format(
        ("detector.xml", "detector.bin"), _save_openvino, _load_openvino, "openvino", exact=False
    ),
    "openvino_int8": Format(
        ("detector_int8.xml", "detector_int8.bin"),
        _save_int8,
        _load_openvino,
        "openvino",
        exact=False,
        by_images=True,
    ),
}
