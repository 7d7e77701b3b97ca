from lit_fedad.memory.coreset import greedy_k_center as greedy_k_center
from lit_fedad.memory.density import estimate_densities as estimate_densities
from lit_fedad.memory.knn import nearest as nearest
from lit_fedad.memory.knn import neighbour_distances as neighbour_distances
from lit_fedad.memory.subspace import fit_subspace as fit_subspace

__all__ = [
    "estimate_densities",
    "fit_subspace",
    "greedy_k_center",
    "nearest",
    "neighbour_distances",
]
