"""Files of exported detectors that compute what the live one does."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.export import ExportedProgram

from lit_fedad.deployment.detector import Outputs
from lit_fedad.deployment.formats import FORMATS
from lit_fedad.deployment.model_card import DetectorFile, OnImages
from lit_fedad.errors import UserError

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
            draft.mkdir(parents=True, exist_ok=True)
            form = FORMATS[name]
            form.save(program, draft / form.files[0], *([normal] if form.by_images else []))
        exported = {
            name: FORMATS[name].load(draft / FORMATS[name].files[0]) for name, draft in drafts.items()
        }
        shares: dict[str, list[float]] = {name: [] for name in formats}
        said: dict[str, list[tuple[Outputs, Outputs]]] = {name: [] for name in formats}
        for one in compared:
            for name, run in exported.items():
                outputs = run(one.pixels)
                shares[name].append(difference(one.live, outputs))
                if one.real:
                    said[name].append((_of_images(one.live), _of_images(outputs)))
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
            written.append(DetectorFile(form.files, size, share, on_images(said[name])))
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
    score, said = ("probabilities", "class") if "class" in pairs[0][0] else ("image_score", "decision")
    one, other = (torch.cat([pair[side][score] for pair in pairs]) for side in (0, 1))
    one, other = one.view(len(one), -1), other.view(len(other), -1)
    tiny = torch.finfo(one.dtype).tiny
    shares = (other - one).abs().amax(1) / one.abs().amax(1).clamp(min=tiny)
    changed = sum(int((live[said] != exported[said]).sum()) for live, exported in pairs)
    return OnImages(len(one), float(shares.median()), float(shares.max()), changed)


def _of_images(outputs: Outputs) -> Outputs:
    """Leaves out what is large."""
    return {name: output for name, output in outputs.items() if name != "anomaly_map"}


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
