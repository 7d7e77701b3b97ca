"""The mean and deviation by which a configuration says that pixels are normalised."""

from collections.abc import Mapping, Sequence
from typing import Any

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


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
