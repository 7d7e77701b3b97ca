"""Robust aggregation: rules for clients whose messages have the declared form and lie."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lit_fedad.contracts import Message, MessageSpec, Update
from lit_fedad.federation.receipt import Remark, Robust


@dataclass(frozen=True)
class RobustAggregation:
    """The rules of a federation by what they judge, each None for no rule; they apply in this order.

    A rule passes messages that it is not about as they are.

    Attributes:
        statistics: Judges means and variances of channels.
        banks: Judges sets of vectors, such as memories and coresets.
        weights: Judges weights, or combines them by other than their mean.
    """

    statistics: Robust | None = None
    banks: Robust | None = None
    weights: Robust | None = None

    def __call__(
        self, updates: Mapping[int, Update], spec: MessageSpec, previous: Message
    ) -> tuple[dict[int, Update], list[Remark]]:
        """Applies all rules; see `Robust`."""
        kept, remarks = dict(updates), list[Remark]()
        for rule in (self.statistics, self.banks, self.weights):
            if rule is not None and kept:
                kept, found = rule(kept, spec, previous)
                remarks += found
        return kept, remarks


def tolerated(share: float, clients: int) -> int:
    """Computes how many liars a rule tolerates: a share of the clients, at least 1, but always a minority.

    Example:
        >>> [tolerated(0.2, clients) for clients in (1, 2, 3, 5, 10, 100)]
        [0, 0, 1, 1, 2, 20]
    """
    return min(max(1, int(share * clients)), max(0, clients - 1) // 2)
