"""Ranges of the configuration's numbers that no target's signature describes."""

import math

RANGES: dict[str, tuple[float, float]] = {
    "rounds": (0, math.inf),
    "batch_size": (1, math.inf),
    "simulation.workers": (0, math.inf),
    "grid": (1, 1024),
    "image.size": (1, 8192),
    "image.resize": (1, 8192),
    "image.tile": (1, 8192),
    "image.overlap": (0, 8192),
    "image.channels": (1, 3),
    "evaluation.every": (1, math.inf),
    "evaluation.batch_size": (1, math.inf),
    "calibration.share": (0, 0.9),
    "calibration.folds": (2, 1000),
    "evaluation.pictures": (0, math.inf),
    "evaluation.pro_limit": (1e-6, 1),
    "evaluation.spro_limit": (1e-6, 1),
}
"""Smallest and largest number by key; the largest sides are above any use, and below what fills the memory at once."""
