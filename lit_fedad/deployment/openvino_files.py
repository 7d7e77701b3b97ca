"""Detectors for OpenVINO: the network's weights in half precision, or the network in eight bits."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.export import ExportedProgram

from lit_fedad.deployment.detector import Outputs
from lit_fedad.deployment.onnx_files import save_onnx

MOST_IMAGES = 300
"""Number of normal images by which ranges of eight-bit numbers are chosen, as nncf's default."""

# Single precision on every CPU: some would take bfloat16 by themselves.
_CPU = {"INFERENCE_PRECISION_HINT": "f32"}


def save_openvino(program: ExportedProgram, path: Path) -> None:
    """Writes a graph for OpenVINO, the network's weights in half precision; all computes in single precision.

    Bank, subspace, threshold and calibration scores stay as they are.

    Args:
        program: The graph.
        path: File to write, ``.xml``; weights go to ``.bin`` beside it.

    Raises:
        UserError: If ONNX lacks an operation of the graph.
    """
    import openvino

    model = _read(program)
    _halve(model, _network(model))
    openvino.save_model(model, path, compress_to_fp16=False)


def save_int8(program: ExportedProgram, path: Path, normal: Sequence[Tensor]) -> None:
    """Writes a graph for OpenVINO whose network computes in eight bits, by post-training quantisation (NNCF).

    What follows it stays in single precision: distances to a bank or subspace, smoothing, decisions.

    Args:
        program: The graph.
        path: As for `save_openvino`.
        normal: Pixels [1, C, H, W] of normal images, which choose the ranges; the first `MOST_IMAGES` are used.

    Raises:
        UserError: If ONNX lacks an operation of the graph.
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


def load_openvino(path: Path) -> Callable[[Tensor], Outputs]:
    """Reads a detector for OpenVINO, to be computed on the CPU.

    Args:
        path: The ``.xml`` file.

    Returns:
        A function from pixels to outputs.
    """
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
        save_onnx(program, path)
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
