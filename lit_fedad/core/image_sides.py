"""Sides of images and of grids of patches that follow from what is given: the resolvers of the YAML files."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Sequence

from omegaconf import OmegaConf

from lit_fedad.core.bounds import RANGES
from lit_fedad.core.building import locate, takes

PATCH = 8
"""Pixels along a patch: the stride of the middle one of three layers of a ResNet or an EfficientNet."""

SMALL, LARGE = 128, 256
"""Sides of images in pixels: of those that are drawn, or learnt from pixel by pixel; and of real ones."""


def image_side(data: str, task: str) -> int:
    """Returns the side that images have where none is given, in pixels.

    Args:
        data: Target of the data. Image files are real, and have no size of their own.
        task: Target of the task. Only one on a frozen backbone sees more than the small side.
    """
    reader = locate(data)
    in_memory = hasattr(typing.get_type_hints(reader).get("return"), "channels")
    real = not in_memory and "size" not in inspect.signature(reader).parameters
    return LARGE if real and takes({"_target_": task}, "backbone") else SMALL


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


def register_resolvers() -> None:
    """Lets YAML files say ``${image_side:DATA,TASK}`` and ``${patches_along:SIZE,TILE}``."""
    for resolver in (image_side, patches_along):
        OmegaConf.register_new_resolver(resolver.__name__, resolver, replace=True)
