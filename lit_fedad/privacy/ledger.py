"""What a site has spent of its privacy, over all runs that asked about its images."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from lit_fedad.core.errors import UserError
from lit_fedad.federation.chained_log import ChainedLog

LEDGER = "ledger.jsonl"
"""File of a site's ledger, in its folder."""

ROUNDING = 1 + 1e-6
"""How much more than a limit still keeps it."""


class BudgetError(UserError):
    """More is asked for than is left.

    Args:
        left: Epsilon that is left.
        asked: Epsilon that is asked for.
        most: The budget.
        others: Number of other runs that were paid for.
    """

    def __init__(self, left: float, asked: float, most: float, others: int) -> None:
        self.left, self.asked = max(left, 0.0), asked
        super().__init__(
            f"this site has epsilon {self.left:.4g} left of {most:g} after {others} other runs on its images, and this"
            f" one asks for {asked:.4g}: its operator decides (docs/sites.md#noise)"
        )


class Ledger:
    """What was released of a site's images, a line each, in a file that only grows.

    A line has the price of its release as it was then: nothing that is asked later makes it cheaper. Releases of one
    run with the same noise are composed (`epsilon` of a line is that of all of them so far); all else adds up, whatever
    images there were (basic composition; Dwork and Roth, The Algorithmic Foundations of Differential Privacy, 2014,
    Theorem 3.16).

    Args:
        file: The file; absent before the first release.
        most: Largest sum of the epsilons; None for any.
    """

    def __init__(self, file: Path, most: float | None = None) -> None:
        self.log, self.most = ChainedLog(file), most

    def _lines(self) -> list[dict[str, Any]]:
        lines = self.log.entries()
        for line in lines:
            pair = (line.get("epsilon"), line.get("delta"))
            if not all(
                isinstance(value, (int, float)) and 0 <= value <= sys.float_info.max for value in pair
            ):
                raise UserError(
                    f"{self.log.file}: holds an epsilon or delta that is none; restore it from a copy"
                )
        return lines

    @property
    def spent(self) -> dict[tuple[str, str], tuple[float, float]]:
        """Returns epsilon and delta by run and mechanism.

        Raises:
            UserError: If the file was changed.
        """
        found: dict[tuple[str, str], tuple[float, float]] = {}
        for line in self._lines():
            if not line["epsilon"]:
                continue  # of noise that a coordinator draws
            key = str(line.get("run")), str(line.get("mechanism"))
            before = found.get(key, (0.0, 0.0))
            found[key] = max(before[0], line["epsilon"]), max(before[1], line["delta"])
        return found

    @property
    def total(self) -> tuple[float, float]:
        """Returns epsilon and delta of all runs together."""
        pairs = self.spent.values()
        return sum(epsilon for epsilon, _ in pairs), sum(delta for _, delta in pairs)

    def released(self, run: str, mechanism: str) -> list[str]:
        """Returns the answers of a run that were paid for, with noise of one size."""
        return [
            str(line.get("answer"))
            for line in self._lines()
            if (line.get("run"), line.get("mechanism")) == (run, mechanism)
        ]

    def others(self, run: str, mechanism: str) -> float:
        """Returns the epsilon of all releases but those of one run with one noise."""
        return sum(price for key, (price, _) in self.spent.items() if key != (run, mechanism))

    def check(self, run: str, mechanism: str, epsilon: float) -> None:
        """Refuses a run that would spend more than is left.

        Raises:
            BudgetError: If that is more.
        """
        if self.most is None:
            return
        left = self.most - self.others(run, mechanism)
        if epsilon > left * ROUNDING:
            raise BudgetError(left, epsilon, self.most, len({other for other, _ in self.spent} - {run}))

    def spend(
        self, run: str, mechanism: str, epsilon: float, delta: float, answer: str = "", images: str = ""
    ) -> None:
        """Notes a release before it is made.

        Args:
            run: Number of the run.
            mechanism: Hash of its noise.
            epsilon: What the run has spent with this noise in all.
            delta: The delta that this holds at.
            answer: Hash of all that the answer follows from.
            images: Hash of the images.

        Raises:
            UserError: If that is more than is left, or cannot be noted.
        """
        self.check(run, mechanism, epsilon)
        self.log.append(
            run=run, mechanism=mechanism, epsilon=epsilon, delta=delta, answer=answer, images=images
        )
