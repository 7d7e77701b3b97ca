"""What YAML files leave to the data and the machine: sizes of images and of grids, and statistics of pixels."""

import contextlib
import os
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from lit_fedad.core.bounds import RANGES, pair
from lit_fedad.core.building import locate, parameters_of

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)

PATCH = 8
"""Pixels along a patch: the stride of the middle one of three layers of a ResNet or an EfficientNet."""

PHOTOGRAPH_MEMORY = 4 * 2**30
"""Bytes of memory from which on photographs are looked at in the larger size."""

_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


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


def gives_arrays(reader: Callable[..., Any]) -> bool:
    """Tells whether a reader of data gives images in memory, which have one size, and no files."""
    with contextlib.suppress(NameError):  # types that are imported for checks alone
        return hasattr(typing.get_type_hints(reader).get("return"), "channels")
    return False


def reads_photographs(reader: Callable[..., Any]) -> bool:
    """Tells whether a reader of data gives files that others made, and not ones that it draws at a ``size``."""
    return not gives_arrays(reader) and "size" not in parameters_of(reader)


def machine_memory() -> int:
    """Returns the bytes of memory of this machine, or of the container that it is."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for limit in _LIMITS:
        with contextlib.suppress(OSError, ValueError):  # there is none, or it says "max"
            memory = min(memory, int(Path(limit).read_text()))
    return memory


def photograph_size(target: str, large: int, small: int) -> int:
    """Returns the side in pixels at which images are looked at: ``large`` for photographs where memory allows it."""
    return large if reads_photographs(locate(target)) and machine_memory() >= PHOTOGRAPH_MEMORY else small


def size_in_words(config: Mapping[str, Any]) -> str:
    """Says at which size a run looks at its images, and by which key another is asked for."""
    height, width = pair("image.size", config["image"]["size"])
    memory, target = machine_memory(), (config["data"] or {}).get("_target_")
    short = target is not None and memory < PHOTOGRAPH_MEMORY and reads_photographs(locate(target))
    available, needed = (f"{size / 2**30:.1f} GiB" for size in (memory, PHOTOGRAPH_MEMORY))
    why = (
        f"; by default photographs get more on a machine of {needed} of memory, here are {available}"
        if short
        else ""
    )
    return f"{height} x {width} pixels (image.size{why})"


def pixel_statistics(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns ``mean`` and ``std`` as the configuration says them; of neither where it leaves them to others.

    The image section wins over the data. Of semantic sets the data's section ``normal`` says them; elsewhere ``normal``
    is a list of labels or folders.

    Example:
        >>> pixel_statistics({"data": {"normal": [0], "mean": [0.5]}, "image": {"size": 32}})
        {'mean': [0.5]}
    """
    data = config["data"]
    normal = data.get("normal")
    places = (data, normal if isinstance(normal, Mapping) else {}, config["image"])
    return {key: place[key] for key in ("mean", "std") for place in places if key in place}


def pixels(key: str, _root_: Mapping[str, Any]) -> Sequence[float]:
    """Returns the ``mean`` or ``std`` of a configuration's pixels; ImageNet's where it says none."""
    imagenet = {"mean": IMAGENET_MEAN, "std": IMAGENET_STD}
    return list({**imagenet, **pixel_statistics(_root_)}[key])


def register_resolvers() -> None:
    """Lets YAML files name `patches_along`, `photograph_size` and `pixels`: ``${pixels:mean}``."""
    for resolver in (patches_along, photograph_size, pixels):
        OmegaConf.register_new_resolver(resolver.__name__, resolver, replace=True)
