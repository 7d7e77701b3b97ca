"""Robust aggregation: rules that judge all clients' messages of an exchange before the server merges them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from lit_fedad.contracts import Message, MessageSpec, Update


class Rule(Protocol):
    """A rule that leaves out or changes messages which would move the result too far."""

    def __call__(
        self, updates: Mapping[int, Update], spec: MessageSpec, previous: Message
    ) -> tuple[dict[int, Update], list[str]]:
        """Judges the messages of an exchange; those that the rule is not about pass as they are.

        Args:
            updates: Updates by client, in client order, of the declared form.
            spec: The declared form of these messages.
            previous: What the server had sent in this exchange; empty where it had sent nothing.

        Returns:
            The updates to merge, in client order, never empty where `updates` is not; and one line for each client
            that lies far out.
        """


@dataclass(frozen=True)
class Robust:
    """The rules of a federation by what they judge, each None for no rule; they apply in this order.

    Attributes:
        counts: Judges how many patches a client says to have.
        statistics: Judges means and variances of channels.
        banks: Judges sets of vectors, such as memories and coresets.
        weights: Judges weights, or combines them by other than their mean.
    """

    counts: Rule | None = None
    statistics: Rule | None = None
    banks: Rule | None = None
    weights: Rule | None = None

    def __call__(
        self, updates: Mapping[int, Update], spec: MessageSpec, previous: Message
    ) -> tuple[dict[int, Update], list[str]]:
        """Applies all rules; see `Rule`."""
        kept, warnings = dict(updates), list[str]()
        for rule in (self.counts, self.statistics, self.banks, self.weights):
            if rule is not None and kept:
                kept, found = rule(kept, spec, previous)
                warnings += found
        return kept, warnings


def tolerated(share: float, clients: int) -> int:
    """Computes how many liars a rule tolerates: a share of the clients, at least 1, but always a minority.

    Example:
        >>> [tolerated(0.2, clients) for clients in (1, 2, 3, 5, 10, 100)]
        [0, 0, 1, 1, 2, 20]
    """
    return min(max(1, int(share * clients)), (clients - 1) // 2)
