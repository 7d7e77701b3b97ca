"""Hyperparameter studies: their files, the workers that share one, and their results."""
