"""Files of exported detectors that compute what the live one does."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.export import ExportedProgram

from lit_fedad.deployment.detector import Outputs
from lit_fedad.deployment.formats import FORMATS
from lit_fedad.deployment.model_card import DetectorFile
from lit_fedad.errors import UserError

TOLERANCE = 1e-4
"""Largest difference of an exported detector from the live one, as a share of the largest value of an output."""


def write_checked(
    program: ExportedProgram,
    formats: Sequence[str],
    folder: Path,
    compared: Iterable[tuple[Tensor, Outputs]],
) -> list[DetectorFile]:
    """Writes a detector in each format; keeps no file if one of them differs from the live detector.

    Args:
        program: The graph, from `lit_fedad.deployment.detector.trace`.
        formats: Keys of `FORMATS`.
        folder: Folder to write to.
        compared: Pairs of pixels [B, C, S, S] and the live detector's outputs, at least one.

    Returns:
        The files ``detector.FORMAT``.

    Raises:
        UserError: If a file differs by more than `TOLERANCE`, or ONNX lacks an operation.
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
    return [
        DetectorFile(path.name, path.stat().st_size, share) for path, share in zip(kept, largest, strict=True)
    ]


def difference(live: Mapping[str, Tensor], exported: Mapping[str, Tensor]) -> float:
    """Computes the difference of an exported detector from the live one.

    Args:
        live: Outputs for one batch; whole numbers, decisions and p-values, which follow from the others by comparisons,
            are not compared.
        exported: Outputs of the exported detector for the same batch.

    Returns:
        The largest absolute difference of an output as a share of its largest absolute value; NaN if an output has
        one.

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
