"""The number of patches that follows from the size of images: a resolver of the YAML files."""

from __future__ import annotations

from collections.abc import Sequence

from omegaconf import OmegaConf

from lit_fedad.core.bounds import RANGES

PATCH = 8
"""Pixels along a patch: the stride of the middle one of three layers of a ResNet or an EfficientNet."""


def patches_along(size: int | Sequence[int], tile: int | None) -> int:
    """Returns how many patches of `PATCH` pixels lie along a tile, or else along an image's short side.

    At least four: image scores leave out the outermost. What is no length is refused later, by its key.

    Example:
        >>> patches_along(256, None), patches_along([512, 2048], 128), patches_along(28, None)
        (32, 16, 4)
    """
    sides = [tile] if tile else size if isinstance(size, Sequence) else [size]
    shortest = min((side for side in sides if isinstance(side, int)), default=0)
    return round(min(max(shortest / PATCH, 4), RANGES["grid"][1]))


def register_resolver() -> None:
    """Lets YAML files say ``${patches_along:SIZE,TILE}``."""
    OmegaConf.register_new_resolver("patches_along", patches_along, replace=True)
