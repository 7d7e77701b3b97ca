"""File formats of exported detectors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.export import ExportedProgram

from lit_fedad.core.errors import UserError
from lit_fedad.core.extras import EXTRAS, install
from lit_fedad.deployment.detector import Outputs
from lit_fedad.deployment.onnx_files import load_onnx, save_onnx
from lit_fedad.deployment.openvino_files import load_openvino, save_int8, save_openvino


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


FORMATS = {
    "onnx": Format(("detector.onnx",), save_onnx, load_onnx, "export"),
    "pt2": Format(("detector.pt2",), save_pt2, load_pt2),
    "openvino": Format(
        ("detector.xml", "detector.bin"), save_openvino, load_openvino, "openvino", exact=False
    ),
    "openvino_int8": Format(
        ("detector_int8.xml", "detector_int8.bin"),
        save_int8,
        load_openvino,
        "openvino",
        exact=False,
        by_images=True,
    ),
}
