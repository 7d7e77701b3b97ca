"""Checks of messages: by their declared form, and by the size of their values among those of other clients."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from lit_fedad.contracts import Free, Message, MessageSpec, TensorSpec, Update
from lit_fedad.contracts.message import LARGEST
from lit_fedad.core.errors import UserError

_LONGEST = 200
"""Most characters that are told of the names in a message: they are its sender's, and kept with the run."""

TINY = 1e-2
"""Magnitude below which the values of an entry count as equally small."""


def check(message: Message, spec: MessageSpec, sender: str) -> None:
    """Checks a message against its declared form.

    Args:
        message: The message.
        spec: Its declared form.
        sender: Name of the sender in errors.

    Raises:
        UserError: If names, sizes, types, devices or values differ from the declared form.
    """
    if not isinstance(message, Mapping):
        raise UserError(f"{sender} sent a {type(message).__name__}, not a dictionary of tensors")
    if set(message) != set(spec):
        missing, extra = sorted(set(spec) - set(message)), sorted(set(message) - set(spec))
        named = str(extra or "nothing")[:_LONGEST]
        raise UserError(f"{sender} sent {named} undeclared and left out {missing or 'nothing'}")
    sizes: dict[str, int] = {}
    for name, form in spec.items():
        tensor = message[name]
        sent = tensor.dtype if isinstance(tensor, Tensor) else f"a {type(tensor).__name__}, no tensor"
        if sent != form.dtype:
            raise UserError(f"{sender} sent '{name}' as {sent}, declared as {form.dtype}")
        if not _fits(tensor.shape, form.shape, sizes):
            declared = ", ".join(map(str, form.shape))
            raise UserError(
                f"{sender} sent '{name}' of shape {tuple(tensor.shape)}, declared as ({declared})"
            )
        if tensor.device.type != "cpu":
            raise UserError(f"{sender} sent '{name}' on {tensor.device}; messages live on the CPU")
        _check_values(tensor, form, f"{sender} sent '{name}'")


def _fits(shape: torch.Size, declared: tuple[int | Free, ...], sizes: dict[str, int]) -> bool:
    """Returns whether a shape is as declared; stores free sizes by name."""
    if len(shape) != len(declared):
        return False
    for size, want in zip(shape, declared, strict=True):
        if isinstance(want, Free):
            if size > (math.inf if want.at_most is None else want.at_most):
                return False
            want = sizes.setdefault(want.name, size)
        if size != want:
            return False
    return True


def _check_values(tensor: Tensor, form: TensorSpec, what: str) -> None:
    if not tensor.numel():
        return
    low, high = (float(bound) for bound in tensor.aminmax())  # one pass: NaN among the values is NaN in both
    if not (math.isfinite(low) and math.isfinite(high)):
        raise UserError(f"{what} with values that are not finite (NaN or infinity)")
    if low < form.low or high > form.high:
        hint = "; has training diverged? Lower the learning rate" if max(high, -low) > LARGEST else ""
        raise UserError(
            f"{what} with values from {low:g} to {high:g}, declared from {form.low:g} to {form.high:g}{hint}"
        )
    if form.distinct and len(tensor.unique()) < tensor.numel():
        raise UserError(f"{what} with a value that occurs twice")
    if form.definite and not _definite(tensor):
        raise UserError(f"{what} with a matrix that is not symmetric and positive definite")


def _definite(matrices: Tensor) -> bool:
    # Sums in another order leave the halves of a covariance unequal in the last digits.
    spread = matrices.diagonal(dim1=-2, dim2=-1).abs().amax(-1)[..., None, None]
    if ((matrices - matrices.mT).abs() > 1e-4 * spread).any():
        return False
    return not torch.linalg.cholesky_ex(matrices.double()).info.any()


def outliers(
    updates: Mapping[int, Update], previous: Message, factor: float, spec: MessageSpec
) -> dict[int, str]:
    """Finds clients whose values are far larger than those of the others and of the last round.

    An entry is far larger if its largest magnitude or its root mean square exceeds `factor` times the median of the
    other clients, and the same of the server's last message where it holds an entry of this name and shape. Without
    either, nothing can be compared. Counts are not: a client may have a thousand times the images of another. Nor is
    anything with zeros: statistics of batch normalisation begin as such, and one image leaves them so.

    Args:
        updates: Updates by client, of the declared form.
        previous: The server's last message.
        factor: Largest ratio.
        spec: The declared form.

    Returns:
        One line by client that is far off.
    """
    found: dict[int, str] = {}
    for name in (name for name, form in spec.items() if not form.counted):
        tensors = {client: update.message[name] for client, update in updates.items()}
        sizes = {client: size for client, t in tensors.items() if (size := _magnitudes(t))}
        last = _magnitudes(previous[name]) if name in previous else None
        for client, own in sizes.items():
            others = [size for other, size in sizes.items() if other != client and any(size)]
            for kind in (0, 1):
                # The upper median: with two others, one of them small, the larger is the measure.
                usual = sorted(size[kind] for size in others)[len(others) // 2] if others else 0.0
                usual = max(usual, last[kind] if last else 0.0)
                # A client alone is not measured by what was zero before training.
                comparable = bool(others) or usual > TINY
                if comparable and own[kind] > factor * (usual := max(usual, TINY)):
                    found.setdefault(
                        client, f"sent '{name}' {own[kind] / usual:.0f} times as large as what is usual"
                    )
    return found


def _magnitudes(tensor: Tensor) -> tuple[float, float] | None:
    """Returns the largest magnitude and the root mean square; None for counts and empty tensors."""
    if not tensor.is_floating_point() or not tensor.numel():
        return None
    low, high = tensor.aminmax()
    norm = torch.linalg.vector_norm(tensor.flatten(), dtype=torch.float64)
    return max(float(high), -float(low)), float(norm) / math.sqrt(tensor.numel())
