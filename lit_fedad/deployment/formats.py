"""File formats of exported detectors: PyTorch's own, ONNX, and OpenVINO in half precision or eight bits."""

from __future__ import annotations

import errno
import logging
import os
import tempfile
from collections.abc import Callable, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.export import ExportedProgram

from lit_fedad.core.errors import UserError, first_line
from lit_fedad.core.extras import install, lacking
from lit_fedad.deployment.detector import Outputs, output_shapes


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
        logging.getLogger(name).setLevel(logging.ERROR)  # they log what they leave unchanged
    # Only where there are some: replacing takes as long as exporting.
    if any(node.target in _ONNX_LACKS for node in program.graph.nodes):
        program = program.run_decompositions(_ONNX_LACKS)
    try:
        onnx = _onnx(program)
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
    """Writes a graph for OpenVINO, with the network's weights in half precision; it computes in single precision.

    Bank, subspace, threshold and calibration scores stay as they are. Weights go to ``.bin`` beside ``.xml``.
    """
    model = _read(program)
    _halve(model, _network(model))
    _write_openvino(model, path)


def _write_openvino(model: Any, path: Path) -> None:
    """Writes a model of OpenVINO; turns its error about a full disk into an `OSError`."""
    import openvino

    try:
        openvino.save_model(model, path, compress_to_fp16=False)
    except RuntimeError as error:
        raise OSError(errno.EIO, first_line(error), str(path)) from error


def _save_int8(program: ExportedProgram, path: Path, normal: Sequence[Tensor]) -> None:
    """Writes a graph for OpenVINO whose network computes in eight bits, by post-training quantisation (NNCF).

    What follows it stays in single precision: distances to a bank or subspace, smoothing, decisions. The first
    `MOST_IMAGES` normal images choose the ranges.
    """
    os.environ.setdefault("NNCF_CI", "1")  # otherwise nncf reports its use to its makers
    import nncf

    model = _read(program)
    network = _network(model)
    names = [node.get_friendly_name() for node in model.get_ordered_ops()]
    in_single_precision = nncf.IgnoredScope(
        names=[name for name in names if name not in network], validate=False
    )
    has_transformer = any(node.get_type_name() == "Gelu" for node in model.get_ordered_ops())
    nncf.set_log_level(logging.ERROR)
    quantised = nncf.quantize(
        model,
        nncf.Dataset([pixels.numpy() for pixels in normal[:MOST_IMAGES]]),
        subset_size=MOST_IMAGES,
        ignored_scope=in_single_precision,
        model_type=nncf.ModelType.TRANSFORMER if has_transformer else None,
    )
    _write_openvino(quantised, path)


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
    """Names convolutions, hidden layers of transformers' blocks, and all operations that they depend on.

    What follows them is the detector's own: small differences of large numbers, for which coarse numbers will not do.
    """
    last = ("Convolution", "GroupConvolution", "Gelu")
    to_visit = [node for node in model.get_ordered_ops() if node.get_type_name() in last]
    names: set[str] = set()
    while to_visit:
        node = to_visit.pop()
        if node.get_friendly_name() not in names:
            names.add(node.get_friendly_name())
            to_visit.extend(value.get_source_output().get_node() for value in node.inputs())
    return names


def _halve(model: Any, names: set[str]) -> None:
    """Stores the weights among the operations of these names in half precision."""
    from openvino import opset13 as operations

    largest = np.finfo(np.float16).max
    for node in model.get_ordered_ops():
        if node.get_friendly_name() not in names or node.get_type_name() != "Constant":
            continue
        if node.get_element_type().get_type_name() == "f32" and np.abs(node.data).max() <= largest:
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
        if extra and (missing := lacking(extra)):
            raise UserError(f"format={name} needs {', '.join(missing)}: {install(extra)}; or give format=pt2")
    return chosen


def _save_pt2(program: ExportedProgram, path: Path) -> None:
    """Writes a graph in the format of `torch.export`, whose own writer ends the process where the disk is full."""
    content = BytesIO()
    torch.export.save(program, content)
    path.write_bytes(content.getbuffer())


def _load_pt2(path: Path) -> Callable[[Tensor], Outputs]:
    """Reads a detector in the format of `torch.export`."""
    module = torch.export.load(path).module()
    return torch.no_grad()(module)


FORMATS = {
    "onnx": Format(("detector.onnx",), _save_onnx, _load_onnx, "export"),
    "pt2": Format(("detector.pt2",), _save_pt2, _load_pt2),
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
