"""File formats of exported detectors."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.export import ExportedProgram

from lit_fedad.deployment.detector import Outputs, output_shapes
from lit_fedad.errors import UserError, first_line
from lit_fedad.extras import EXTRAS, install


class Format(NamedTuple):
    """A file format.

    Attributes:
        save: Writes a graph to a file.
        load: Reads a file into a function from pixels [B, C, S, S] to outputs.
        needs: Packages that it needs beyond those of this one.
    """

    save: Callable[[ExportedProgram, Path], None]
    load: Callable[[Path], Callable[[Tensor], Outputs]]
    needs: tuple[str, ...] = ()


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
        if missing := [package for package in FORMATS[name].needs if find_spec(package) is None]:
            raise UserError(
                f"format={name} needs {', '.join(missing)}: {install('export')}; or give format=pt2"
            )
    return chosen


def save_pt2(program: ExportedProgram, path: Path) -> None:
    """Writes a graph in the format of `torch.export`.

    Args:
        program: The graph.
        path: File to write.
    """
    torch.export.save(program, path)


def load_pt2(path: Path) -> Callable[[Tensor], Outputs]:
    """Reads a detector in the format of `torch.export`.

    Args:
        path: The file.

    Returns:
        A function from pixels to outputs.
    """
    module = torch.export.load(path).module()
    return torch.no_grad()(module)


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


FORMATS = {
    "onnx": Format(save_onnx, load_onnx, EXTRAS["export"]),
    "pt2": Format(save_pt2, load_pt2),
}
