"""Hashes that identify a run: of the keys that decide what it trains, and of those that decide how it is judged."""

from collections.abc import Mapping
from typing import Any

from lit_fedad.core.nested import hash_of
from lit_fedad.core.text import redacted

CIRCUMSTANCES = ("out", "tracking", "fabric", "simulation", "cache", "fresh", "callbacks")
"""Sections and keys on where and how a run is executed; only precision and ``cache.enabled`` of them affect results."""

# Keys of the evaluation that do not affect training.
_JUDGEMENT = ("alpha", "pictures", "alone", "batch_size")

TILING = ("tile", "overlap")
"""Keys of the image section on how images are cut into tiles."""


def identity(config: Mapping[str, Any]) -> str:
    """Computes a short hash of all keys that decide what a run trains; other keys may change when it is resumed."""
    decisive = {key: value for key, value in config.items() if key not in CIRCUMSTANCES}
    # Cached features have half precision, so results without the cache differ in the last digits.
    decisive["precision"] = str(config.get("fabric", {}).get("precision"))
    decisive["cached"] = config.get("cache", {}).get("enabled", True)
    image, data = config.get("image", {}), config.get("data") or {}
    # Unused keys of tiles, page, split and saturation are left out: the hash then equals that of a run from before
    # these keys existed.
    unused = (
        *(TILING if image.get("tile") is None else ()),
        *(("page",) if image.get("page") is None else ()),
    )
    decisive["image"] = {key: value for key, value in image.items() if key not in unused}
    if data.get("split_seed") is None:
        decisive["data"] = {key: value for key, value in data.items() if key != "split_seed"}
    excluded = _JUDGEMENT if "saturation" in data else (*_JUDGEMENT, "spro_limit")
    evaluation = {key: value for key, value in config.get("evaluation", {}).items() if key not in excluded}
    return hash_of(redacted({**decisive, "evaluation": evaluation}))


def judgement(config: Mapping[str, Any]) -> str:
    """Computes a short hash of the keys that, in addition to those of `identity`, decide a complete run's results."""
    evaluation = config.get("evaluation", {})
    return hash_of(redacted({key: evaluation.get(key) for key in _JUDGEMENT if key != "batch_size"}))
