"""Numbers that tests draw."""

import torch
from torch.nn import functional as F


def generator(seed: int = 0) -> torch.Generator:
    """Makes a generator that starts at a seed."""
    return torch.Generator().manual_seed(seed)


def normals(*shape: int, seed: int = 0) -> torch.Tensor:
    """Draws normal numbers, float32."""
    return torch.randn(shape, generator=generator(seed))


def rows(*shape: int, seed: int = 0) -> torch.Tensor:
    """Draws normal numbers, float64."""
    return torch.randn(shape, generator=generator(seed), dtype=torch.float64)


def units(*shape: int, seed: int = 0) -> torch.Tensor:
    """Draws vectors of length 1, float64."""
    return F.normalize(rows(*shape, seed=seed), dim=-1)
