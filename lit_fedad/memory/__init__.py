"""Summaries of features: memory banks, densities, subspaces and prototypes, and the kernels that they need."""

from lit_fedad.core.lazy_names import lazy_names

# Names are imported on first use, since few users need all modules.
_NAMES = {
    "estimate_densities": "density.estimate_densities",
    "fit_subspace": "subspace.fit_subspace",
    "greedy_k_center": "coreset.greedy_k_center",
    "nearest": "knn.nearest",
    "neighbour_distances": "knn.neighbour_distances",
}
__all__ = [*_NAMES]
__getattr__, __dir__ = lazy_names(__name__, _NAMES)
