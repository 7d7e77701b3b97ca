"""Values that YAML files derive from the data and the machine: sizes of images and grids, and statistics of pixels."""

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
"""Side of a patch in pixels: the stride of the second of the three layers of a ResNet or an EfficientNet."""

PHOTOGRAPH_MEMORY = 4 * 2**30
"""Memory in bytes that a machine needs for the larger default size of photographs."""

# Files in which a container's limit of memory is found (cgroups 2 and 1).
_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def patches_along(size: int | Sequence[int], tile: int | None) -> int:
    """Returns the number of patches of `PATCH` pixels along a tile, or without tiles along an image's short side.

    There are at least four, because image scores leave out the outermost patches. Sizes that are no lengths are ignored
    here and refused later, under their key.

    Example:
        >>> patches_along(256, None), patches_along([512, 2048], 128), patches_along(28, None)
        (32, 16, 4)
    """
    sides = [tile] if tile else size if isinstance(size, Sequence) else [size]
    shortest = min((side for side in sides if isinstance(side, int)), default=0)
    return round(min(max(shortest / PATCH, 4), RANGES["grid"][1]))


def gives_arrays(reader: Callable[..., Any]) -> bool:
    """Returns whether a reader of data returns images in memory, which all have one size, instead of files."""
    with contextlib.suppress(NameError):  # annotations whose types are imported only for type checkers
        return hasattr(typing.get_type_hints(reader).get("return"), "channels")
    return False


def reads_photographs(reader: Callable[..., Any]) -> bool:
    """Returns whether a reader of data returns existing image files, not images that it draws at a given ``size``."""
    return not gives_arrays(reader) and "size" not in parameters_of(reader)


def machine_memory() -> int:
    """Returns the memory of this machine in bytes, or the limit of its container if that is smaller."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for limit in _LIMITS:
        with contextlib.suppress(OSError, ValueError):  # the file is missing, or says "max" for no limit
            memory = min(memory, int(Path(limit).read_text()))
    return memory


def photograph_size(target: str, large: int, small: int) -> int:
    """Returns the default side of images in pixels: ``large`` for photographs if memory allows it, else ``small``."""
    return large if reads_photographs(locate(target)) and machine_memory() >= PHOTOGRAPH_MEMORY else small


def size_in_words(config: Mapping[str, Any]) -> str:
    """Describes the size of a run's images, and the key that changes it; explains a size that memory has limited."""
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
    """Returns the ``mean`` and ``std`` that the configuration gives; a key is missing if it gives none.

    The image section takes precedence over the data section. In semantic sets the data's section ``normal`` gives them;
    in other sets ``normal`` is a list of labels or folders.

    Example:
        >>> pixel_statistics({"data": {"normal": [0], "mean": [0.5]}, "image": {"size": 32}})
        {'mean': [0.5]}
    """
    data = config["data"]
    normal = data.get("normal")
    sections = (data, normal if isinstance(normal, Mapping) else {}, config["image"])  # the last one counts
    return {key: section[key] for key in ("mean", "std") for section in sections if key in section}


def pixels(key: str, _root_: Mapping[str, Any]) -> Sequence[float]:
    """Returns the ``mean`` or ``std`` of pixels that a configuration gives; that of ImageNet if it gives none."""
    imagenet = {"mean": IMAGENET_MEAN, "std": IMAGENET_STD}
    return list({**imagenet, **pixel_statistics(_root_)}[key])


def register_resolvers() -> None:
    """Lets YAML files call `patches_along`, `photograph_size` and `pixels`, as in ``${pixels:mean}``."""
    for resolver in (patches_along, photograph_size, pixels):
        OmegaConf.register_new_resolver(resolver.__name__, resolver, replace=True)
