"""Checks of messages against their declared form, and of their values against those of other clients."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from lit_fedad.contracts import Free, Message, MessageSpec, TensorSpec, Update
from lit_fedad.contracts.message import LARGEST
from lit_fedad.core.errors import UserError

_MAX_NAME_CHARS = 200
"""Largest number of characters of undeclared names in an error, which the sender chose and the run's files keep."""

TINY = 1e-2
"""Magnitude below which values are compared as if they had this magnitude."""


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
        named = str(extra or "nothing")[:_MAX_NAME_CHARS]
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
    """Returns whether a shape is as declared; stores the sizes that the sender chose in `sizes`, by name."""
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
    """Checks the values of a tensor against its declared form; `what` begins the error message."""
    if not tensor.numel():
        return
    low, high = (float(bound) for bound in tensor.aminmax())  # a NaN among the values makes both NaN
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
    """Returns whether all matrices are symmetric and positive definite."""
    # The tolerance allows for rounding: a covariance that is summed in another order is not exactly symmetric.
    scale = matrices.diagonal(dim1=-2, dim2=-1).abs().amax(-1)[..., None, None]
    if ((matrices - matrices.mT).abs() > 1e-4 * scale).any():
        return False
    return not torch.linalg.cholesky_ex(matrices.double()).info.any()


def outliers(
    updates: Mapping[int, Update], previous: Message, factor: float, spec: MessageSpec
) -> dict[int, str]:
    """Finds clients whose values are far larger than those of the other clients and of the last round.

    An entry is far larger if its largest magnitude or its root mean square exceeds `factor` times the median over the
    other clients and, if the server's last message has an entry of this name, `factor` times the value of that entry.
    Without either, nothing is compared. Counts are not compared, because a client may have a thousand times as many
    images as another. Entries of other clients that are all zero are left out of the median: statistics of batch
    normalisation begin at zero, and stay there with one image.

    Args:
        updates: Updates by client, of the declared form.
        previous: The server's last message.
        factor: Largest ratio that is accepted.
        spec: The declared form.

    Returns:
        For each client with far larger values, a line that names the entry and the ratio.
    """
    remarks: dict[int, str] = {}
    for name in (name for name, form in spec.items() if not form.counted):
        tensors = {client: update.message[name] for client, update in updates.items()}
        sizes = {client: size for client, t in tensors.items() if (size := _magnitudes(t))}
        last = _magnitudes(previous[name]) if name in previous else None
        for client, magnitudes in sizes.items():
            others = [size for other, size in sizes.items() if other != client and any(size)]
            for kind in (0, 1):
                # The upper median: of two other clients, the one with the larger values counts.
                usual = sorted(size[kind] for size in others)[len(others) // 2] if others else 0.0
                usual = max(usual, last[kind] if last else 0.0)
                # A single client is not compared with values that were zero before training.
                comparable = bool(others) or usual > TINY
                if comparable and magnitudes[kind] > factor * (usual := max(usual, TINY)):
                    remarks.setdefault(
                        client,
                        f"sent '{name}' {magnitudes[kind] / usual:.0f} times as large as what is usual",
                    )
    return remarks


def _magnitudes(tensor: Tensor) -> tuple[float, float] | None:
    """Returns the largest magnitude and the root mean square; None for integer and empty tensors."""
    if not tensor.is_floating_point() or not tensor.numel():
        return None
    low, high = tensor.aminmax()
    norm = torch.linalg.vector_norm(tensor.flatten(), dtype=torch.float64)
    return max(float(high), -float(low)), float(norm) / math.sqrt(tensor.numel())
