"""A tiny memory bank that is made of sums, for tests of methods."""

from typing import Any

import torch

from helpers.tiny_pyramid import TinyPyramid
from lit_fedad.memory.reduce import SlotReduce
from lit_fedad.tasks.memory_bank import MemoryBank
from lit_fedad.tasks.slot_distances import HingeLoss, LocalScale, Softmin


def summed_bank(**changes: Any) -> MemoryBank:
    """Makes the bank, with the same weights each time."""
    torch.manual_seed(0)
    settings = {
        "backbone": TinyPyramid(),
        "grid": 4,
        "image_size": 32,
        "head": None,
        "loss": HingeLoss(),
        "score": Softmin(),
        "reduce": SlotReduce(weights="none", average=False),
        "image_score": LocalScale(),
        "subspace": 0.9,
        "slots": 12,
        "standardise": True,
        "whiten": 0.1,
    }
    return MemoryBank(**{**settings, **changes})
