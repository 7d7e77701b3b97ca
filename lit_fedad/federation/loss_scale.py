"""The scale of losses under ``16-mixed``: every client's own, so that no turn depends on whose was before."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins import MixedPrecision

Scale = dict[str, Any]


@contextmanager
def own_scale(fabric: Fabric | None, state: Scale | None = None) -> Iterator[torch.amp.GradScaler | None]:
    """Trains with a gradient scaler of its own for a block; the Fabric's stays as it was made.

    Args:
        fabric: Holds the scaler that others are copies of; None where nothing was launched.
        state: State that an earlier block's scaler ended with; None for the first scale.

    Yields:
        The scaler, whose ``state_dict`` is where the next block goes on; None where losses are not scaled.
    """
    precision = fabric.strategy.precision if fabric else None
    if not isinstance(precision, MixedPrecision) or precision.scaler is None:
        yield None
        return
    first, scaler = precision.scaler, deepcopy(precision.scaler)
    if state is not None:
        scaler.load_state_dict(state)
    precision.scaler = scaler
    try:
        yield scaler
    finally:
        precision.scaler = first
