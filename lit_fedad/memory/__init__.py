"""Memory-bank kernels: neighbours, k-means, memory-reduce, coreset."""

from importlib import import_module
from typing import Any

# Imported when they are asked for: most modules of this room need one another, and few need all. Types: __init__.pyi.
_MODULES = {
    "covering_radius": "coreset",
    "estimate_densities": "density",
    "fit_subspace": "subspace",
    "greedy_k_center": "coreset",
    "nearest": "knn",
    "neighbour_distances": "knn",
}
__all__ = [*_MODULES]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return [*_MODULES]
