"""The ledger of a site: the privacy budget that it has spent over all runs on its images."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from lit_fedad.core.errors import UserError
from lit_fedad.federation.chained_log import ChainedLog

LEDGER = "ledger.jsonl"
"""Name of the ledger's file in a site's folder."""

ROUNDING = 1 + 1e-6
"""Factor by which a value may exceed a limit, to allow for rounding."""


class BudgetError(UserError):
    """The error for a run that asks for more epsilon than is left.

    Args:
        left: Epsilon that is left.
        asked: Epsilon that the run asks for.
        limit: The site's budget.
        others: Number of other runs that the budget was spent on.
    """

    def __init__(self, left: float, asked: float, limit: float, others: int) -> None:
        self.left, self.asked = max(left, 0.0), asked
        super().__init__(
            f"this site has epsilon {self.left:.4g} left of {limit:g} after {others} other runs on its images, and this"
            f" one asks for {asked:.4g}: its operator decides (docs/sites.md#noise)"
        )


class Ledger:
    """The list of releases of information about a site's images, one line each, in an append-only file.

    A line has the price of its release at that time, which no later request can lower. Releases of one run with the
    same noise are composed: `epsilon` of a line is the price of all of them so far. All other releases add up, whatever
    images they are about (basic composition; Dwork and Roth, The Algorithmic Foundations of Differential Privacy, 2014,
    Theorem 3.16).

    Args:
        file: The file; absent before the first release.
        budget: Largest sum of the epsilons; None for no limit.
    """

    def __init__(self, file: Path, budget: float | None = None) -> None:
        self.log, self.budget = ChainedLog(file), budget

    def _lines(self) -> list[dict[str, Any]]:
        """Reads all lines, and checks their prices."""
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
        """Returns epsilon and delta by run and mechanism (the hash of the noise).

        Raises:
            UserError: If the file was changed.
        """
        prices: dict[tuple[str, str], tuple[float, float]] = {}
        for line in self._lines():
            if not line["epsilon"]:
                continue  # the coordinator draws the noise of this release
            key = str(line.get("run")), str(line.get("mechanism"))
            earlier = prices.get(key, (0.0, 0.0))
            prices[key] = max(earlier[0], line["epsilon"]), max(earlier[1], line["delta"])
        return prices

    @property
    def total(self) -> tuple[float, float]:
        """Returns the sums of epsilon and delta over all runs."""
        pairs = self.spent.values()
        return sum(epsilon for epsilon, _ in pairs), sum(delta for _, delta in pairs)

    def released(self, run: str, mechanism: str) -> list[str]:
        """Returns the hashes of the answers of a run that were noted with this mechanism."""
        return [
            str(line.get("answer"))
            for line in self._lines()
            if (line.get("run"), line.get("mechanism")) == (run, mechanism)
        ]

    def others(self, run: str, mechanism: str) -> float:
        """Returns the epsilon of all releases except those of one run with one mechanism."""
        return sum(price for key, (price, _) in self.spent.items() if key != (run, mechanism))

    def check(self, run: str, mechanism: str, epsilon: float) -> None:
        """Refuses a run that would spend more than is left.

        Raises:
            BudgetError: If `epsilon` exceeds the part of the budget that other releases have left.
        """
        if self.budget is None:
            return
        left = self.budget - self.others(run, mechanism)
        if epsilon > left * ROUNDING:
            raise BudgetError(left, epsilon, self.budget, len({other for other, _ in self.spent} - {run}))

    def spend(
        self, run: str, mechanism: str, epsilon: float, delta: float, answer: str = "", images: str = ""
    ) -> None:
        """Notes a release; to be called before the release is made.

        Args:
            run: Number of the run.
            mechanism: Hash of the noise.
            epsilon: Epsilon that the run has spent with this mechanism in all, with this release.
            delta: The delta for which this epsilon holds.
            answer: Hash of everything that the released answer depends on.
            images: Hash of the images.

        Raises:
            UserError: If the run would spend more than is left, or the file cannot be written.
        """
        self.check(run, mechanism, epsilon)
        self.log.append(
            run=run, mechanism=mechanism, epsilon=epsilon, delta=delta, answer=answer, images=images
        )
