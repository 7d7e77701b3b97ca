"""Condensation of a client's images into a few synthetic ones: kernels, batch statistics, optimisation."""
