"""The gradient scaler of 16-mixed on a CPU, without half precision."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins import MixedPrecision


class Scaled(MixedPrecision):
    """Scales losses and unscales gradients as ``16-mixed`` does, and rounds nothing."""

    def forward_context(self):
        return nullcontext()

    def convert_input(self, data):
        return data

    def convert_output(self, data):
        return data


def scaled_fabric(scale: float = 2.0**16, backoff: float = 0.5, callbacks=()) -> Fabric:
    """A Fabric whose first scale is ``scale``, multiplied by ``backoff`` where gradients overflow."""
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, backoff_factor=backoff)
    plugin = Scaled("16-mixed", "cpu", scaler)
    return Fabric(accelerator="cpu", devices=1, plugins=[plugin], callbacks=list(callbacks))
