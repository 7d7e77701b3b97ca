"""What a site has spent of its privacy, over all runs that asked about its images."""

from __future__ import annotations

import json
import math
from pathlib import Path

from lit_fedad.core.errors import UserError
from lit_fedad.core.files import atomic

LEDGER = "ledger.json"
"""File of a site's ledger, in its folder."""

_ROUNDING = 1 + 1e-6


class Ledger:
    """The epsilons of a site's runs, in a file of its own.

    Epsilons and deltas of runs on the same images add up, whatever noise each run has (basic composition; Dwork and
    Roth, The Algorithmic Foundations of Differential Privacy, 2014, Theorem 3.16).

    Args:
        file: The file; absent before the first run.
        most: Largest sum of the epsilons; None for any.
    """

    def __init__(self, file: Path, most: float | None = None) -> None:
        self.file, self.most = file, most

    @property
    def spent(self) -> dict[str, tuple[float, float]]:
        """Returns epsilon and delta of each run.

        Raises:
            UserError: If the file holds something else.
        """
        try:
            content = json.loads(self.file.read_text()) if self.file.exists() else {}
            found = {str(run): (float(epsilon), float(delta)) for run, (epsilon, delta) in content.items()}
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise UserError(f"{self.file}: cannot be read; restore it from a copy") from error
        if not all(math.isfinite(value) and value >= 0 for pair in found.values() for value in pair):
            raise UserError(f"{self.file}: holds an epsilon or delta that is none; restore it from a copy")
        return found

    @property
    def total(self) -> tuple[float, float]:
        """Returns epsilon and delta of all runs together."""
        pairs = self.spent.values()
        return sum(epsilon for epsilon, _ in pairs), sum(delta for _, delta in pairs)

    def left(self, run: str) -> float:
        """Computes the epsilon that a run may spend in all."""
        if self.most is None:
            return math.inf
        return self.most - sum(epsilon for other, (epsilon, _) in self.spent.items() if other != run)

    def check(self, run: str, epsilon: float) -> None:
        """Refuses a run that would spend more than is left.

        Args:
            run: Number of the run.
            epsilon: What it spends in all.

        Raises:
            UserError: If that is more.
        """
        if epsilon > self.left(run) * _ROUNDING:
            others = len(self.spent.keys() - {run})
            raise UserError(
                f"this site has epsilon {max(self.left(run), 0):.4g} left of {self.most:g} after {others} other runs on"
                f" its images, and this one asks for {epsilon:.4g}: its operator decides (docs/sites.md#noise)"
            )

    def spend(self, run: str, epsilon: float, delta: float) -> None:
        """Notes what a run has spent so far, before it is answered.

        Args:
            run: Number of the run.
            epsilon: What it has spent in all.
            delta: The delta that this holds at.

        Raises:
            UserError: If that is more than is left, or cannot be noted.
        """
        self.check(run, epsilon)
        content = {**self.spent, run: (epsilon, delta)}
        try:
            with atomic(self.file, durable=True) as partial:
                partial.write_text(json.dumps(content, indent=1))
        except OSError as error:
            raise UserError(f"{self.file}: cannot be written ({error.strerror})") from error
