"""What identifies a run: hashes of the keys that decide what it trains, and of those that decide how it is judged."""

from collections.abc import Mapping
from typing import Any

from lit_fedad.core.nested import hash_of
from lit_fedad.core.text import redacted

CIRCUMSTANCES = ("out", "tracking", "fabric", "simulation", "cache", "fresh", "callbacks")
"""Sections and keys that say where and how a run happens; of them precision and ``cache.enabled`` decide a result."""

# Keys of the evaluation that no training depends on.
_JUDGEMENT = ("alpha", "pictures", "alone", "batch_size")

TILING = ("tile", "overlap")
"""Keys of the image that say how it is cut into tiles."""


def identity(config: Mapping[str, Any]) -> str:
    """Computes a short hash of all keys that decide what a run trains: others may change when it is resumed."""
    decisive = {key: value for key, value in config.items() if key not in CIRCUMSTANCES}
    # Cached features are in half precision: a run without the cache ends with other last digits.
    decisive["precision"] = str(config.get("fabric", {}).get("precision"))
    decisive["cached"] = config.get("cache", {}).get("enabled", True)
    image, data = config.get("image", {}), config.get("data") or {}
    # Without tiles, a page, an own split or regions that saturate, a run is the same as before there were their keys.
    unused = (
        *(TILING if image.get("tile") is None else ()),
        *(("page",) if image.get("page") is None else ()),
    )
    decisive["image"] = {key: value for key, value in image.items() if key not in unused}
    if data.get("split_seed") is None:
        decisive["data"] = {key: value for key, value in data.items() if key != "split_seed"}
    aside = _JUDGEMENT if "saturation" in data else (*_JUDGEMENT, "spro_limit")
    evaluation = {key: value for key, value in config.get("evaluation", {}).items() if key not in aside}
    return hash_of(redacted({**decisive, "evaluation": evaluation}))


def judgement(config: Mapping[str, Any]) -> str:
    """Computes a short hash of the keys that decide, beside those of `identity`, what a complete run's files say."""
    evaluation = config.get("evaluation", {})
    return hash_of(redacted({key: evaluation.get(key) for key in _JUDGEMENT if key != "batch_size"}))
