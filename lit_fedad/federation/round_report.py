"""The report of one round."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from lit_fedad.contracts import Client, Exchange
from lit_fedad.core.client_names import ClientNames


@dataclass
class RoundReport:
    """The report of one round: of one set-up exchange, or of all exchanges of a training round.

    Attributes:
        round: Round number; set-up exchanges count up to 0.
        exchange: Name of the round's first exchange.
        participants: Clients that finished the round.
        failures: Causes by client that failed in the round.
        unscored: Causes by client that could not be scored after the round.
        refused: Causes by client whose messages were not merged.
        scalars: Loss and diagnostics by name: means over clients, weighted by their numbers of images.
        per_client: Loss and diagnostics by client.
        bytes_up: Bytes that each client sent.
        bytes_down: Bytes that each client received.
        elements_up: Tensor elements that each client sent.
        seconds: Wall-clock time without evaluation, in seconds.
        trained: Values of `Evaluator.score` for the participants directly after training, where `after_fit` is set.
        metrics: Metrics after this round; None if no evaluation was due.
        warnings: Further warnings for the user, one line each.
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

    def lines(self, names: ClientNames) -> list[str]:
        """Returns one line for each client that was left out and for each warning, in the order of the round."""

        def lines_of(causes: Mapping[int, str], what: str) -> list[str]:
            return [
                f"round {self.round}: {names.title(client)} {what}: {cause}"
                for client, cause in causes.items()
            ]

        return [
            *lines_of(self.failures, "left out"),
            *lines_of(self.refused, "refused"),
            *self.warnings,
            *lines_of(self.unscored, "left out of the evaluation"),
        ]


def add_counts(totals: dict[int, int], counts: Mapping[int, int]) -> None:
    """Adds counts by client to totals by client, in place."""
    for client, count in counts.items():
        totals[client] = totals.get(client, 0) + count


def add_bytes(totals: dict[int, int], blobs: Mapping[int, bytes]) -> None:
    """Adds the lengths of messages by client to totals by client, in place."""
    add_counts(totals, {client: len(blob) for client, blob in blobs.items()})


def add_causes(totals: dict[int, str], causes: Mapping[int, str]) -> None:
    """Adds causes by client, in place; the first cause of a client is kept."""
    for client, cause in causes.items():
        totals.setdefault(client, cause)


class Budget(Protocol):
    """The budget of differential privacy of a run."""

    @property
    def releases(self) -> int:
        """Number of releases (noised sums, or rounds of training) of the whole run."""

    def check(self, releases: int, what: str) -> None:
        """Refuses a number of releases that would overdraw the budget; `what` names their cause in the error."""

    def released_in(self, exchanges: Sequence[Exchange], client: Client) -> int:
        """Counts the exchanges that release information about images."""

    def summary(self, releases: int) -> dict[str, float | int | str | bool]:
        """Describes how much of the budget so many releases spend."""
