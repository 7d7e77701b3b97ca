"""Detectors in ONNX."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram

from lit_fedad.core.errors import UserError, first_line
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


def save_onnx(program: ExportedProgram, path: Path) -> None:
    """Writes a graph as ONNX.

    Args:
        program: The graph.
        path: File to write.

    Raises:
        UserError: If ONNX lacks an operation of the graph.
    """
    for name in ("onnxscript", "onnx_ir"):
        logging.getLogger(name).setLevel(logging.ERROR)  # they log what they leave as it is
    try:
        onnx = torch.onnx.export(
            program.run_decompositions(_ONNX_LACKS),
            dynamo=True,
            input_names=["pixels"],
            output_names=list(output_shapes(program)),
            dynamic_shapes={"pixels": {0: "batch"}},
            external_data=False,
            verbose=False,
        )
    except torch.onnx.OnnxExporterError as error:
        cause = first_line(error.__cause__ or error)
        raise UserError(
            f"format=onnx: ONNX lacks what the detector computes ({cause}); give format=pt2"
        ) from error
    assert onnx is not None
    onnx.save(path)


def load_onnx(path: Path) -> Callable[[Tensor], Outputs]:
    """Reads a detector in ONNX, to be computed by onnxruntime on the CPU.

    Args:
        path: The file.

    Returns:
        A function from pixels to outputs.
    """
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]

    def run(pixels: Tensor) -> Outputs:
        values = session.run(names, {"pixels": pixels.numpy()})
        return {name: torch.from_numpy(value) for name, value in zip(names, values, strict=True)}

    return run
