"""The report of one round."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class RoundReport:
    """The report of one round: of one set-up exchange, or of all exchanges of a training round.

    Attributes:
        round: Round number; set-up exchanges count up to 0.
        exchange: Name of the round's first exchange.
        participants: Clients that finished the round.
        failures: Causes by client that failed in the round.
        unscored: Causes by client that could not be scored after it.
        refused: Causes by client whose messages were not merged.
        scalars: Loss and diagnostics: means over clients, weighted by their numbers of images.
        per_client: Loss and diagnostics by client.
        bytes_up: Bytes that each client sent.
        bytes_down: Bytes that each client received.
        elements_up: Tensor elements that each client sent.
        seconds: Wall-clock time without evaluation, in seconds.
        trained: Values of `Evaluator.score` for the participants directly after training, where `after_fit` is set.
        metrics: Evaluation after this round; None where none was due.
        warnings: Warnings for the user, one line each.
        noised_sums: Sums over clients' images that were released with the noise of differential privacy.
    """

    round: int
    exchange: str
    participants: list[int]
    failures: dict[int, str] = field(default_factory=dict)
    unscored: dict[int, str] = field(default_factory=dict)
    refused: dict[int, str] = field(default_factory=dict)
    scalars: dict[str, float] = field(default_factory=dict)
    per_client: dict[int, dict[str, float]] = field(default_factory=dict)
    bytes_up: dict[int, int] = field(default_factory=dict)
    bytes_down: dict[int, int] = field(default_factory=dict)
    elements_up: dict[int, int] = field(default_factory=dict)
    seconds: float = 0.0
    trained: dict[int, Any] = field(default_factory=dict)
    metrics: dict[str, Any] | None = None
    warnings: list[str] = field(default_factory=list)
    noised_sums: int = 0

    def fail(self, causes: dict[int, str]) -> None:
        """Adds clients that failed, each with a warning."""
        self._add(self.failures, causes, "left out")

    def refuse(self, causes: dict[int, str]) -> None:
        """Adds clients whose messages were refused, each with a warning."""
        self._add(self.refused, causes, "refused")

    def leave_unscored(self, causes: dict[int, str]) -> None:
        """Adds clients that could not be scored, each with one warning, however often it was tried."""
        self._add(self.unscored, causes, "left out of the evaluation")

    def _add(self, known: dict[int, str], causes: dict[int, str], what: str) -> None:
        for client, cause in causes.items():
            if client not in known:
                known[client] = cause
                self.warnings.append(f"round {self.round}: client {client} {what}: {cause}")


def add_counts(totals: dict[int, int], counts: dict[int, int]) -> None:
    """Adds counts by client to totals by client, in place."""
    for client, count in counts.items():
        totals[client] = totals.get(client, 0) + count
