"""Numbers that tests draw."""

import torch
from torch.nn import functional as F


def rows(*shape: int, seed: int = 0) -> torch.Tensor:
    """Draws normal numbers, float64."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def units(*shape: int, seed: int = 0) -> torch.Tensor:
    """Draws vectors of length 1, float64."""
    return F.normalize(rows(*shape, seed=seed), dim=-1)
