"""Memory-bank kernels: neighbours, k-means, memory-reduce, coreset."""
