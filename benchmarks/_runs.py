"""Whole runs in a temporary folder, for timing."""

import statistics
import tempfile
from pathlib import Path
from typing import Any

from lit_fedad.core.config import compose
from lit_fedad.experiment.train import train

PLAIN = ["tracking=off", "evaluation.pictures=0", "evaluation.every=1000"]


def run(*overrides: str, folder: Path | None = None) -> dict[str, Any]:
    """Trains in a fresh folder and returns the result."""
    with tempfile.TemporaryDirectory(dir=folder) as out:
        return train(compose([*PLAIN, f"out={out}/run", *overrides]), quiet=True)


def seconds_a_round(result: dict[str, Any]) -> float:
    """Median over training rounds, the first left out as warm-up where there are several."""
    seconds = [s for r, s in zip(result["exchanges"], result["seconds_per_round"], strict=True) if r > 0]
    return statistics.median(seconds[1:] or seconds)
