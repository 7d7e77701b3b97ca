"""What one round did."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class RoundReport:
    """What one round did: one exchange before round 1, or all exchanges of a round.

    Attributes:
        round: Number; set-up exchanges count up to 0.
        exchange: Name of its first exchange.
        participants: Clients that finished.
        failures: Causes by client that failed.
        scalars: Loss and diagnostics: means over clients, weighted by their images.
        per_client: Loss and diagnostics by client.
        bytes_up: Bytes that each client sent.
        bytes_down: Bytes that each client was sent.
        elements_up: Numbers that each client sent.
        seconds: Wall-clock time without evaluation.
        trained: What the evaluator made of the participants' models at the end of the round, where it asked.
        metrics: Evaluation after this round; None where none was due.
        warnings: Lines for the user.
    """

    round: int
    exchange: str
    participants: list[int]
    failures: dict[int, str] = field(default_factory=dict)
    scalars: dict[str, float] = field(default_factory=dict)
    per_client: dict[int, dict[str, float]] = field(default_factory=dict)
    bytes_up: dict[int, int] = field(default_factory=dict)
    bytes_down: dict[int, int] = field(default_factory=dict)
    elements_up: dict[int, int] = field(default_factory=dict)
    seconds: float = 0.0
    trained: dict[int, Any] = field(default_factory=dict)
    metrics: dict[str, Any] | None = None
    warnings: list[str] = field(default_factory=list)


def add_counts(totals: dict[int, int], counts: dict[int, int]) -> None:
    """Adds counts by client to totals by client, in place."""
    for client, count in counts.items():
        totals[client] = totals.get(client, 0) + count
