"""A rule for channel statistics, which servers pool: one false term decides a sum."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from lit_fedad.contracts import Message, MessageSpec, Update
from lit_fedad.federation.aggregation import STATISTICS
from lit_fedad.federation.robust import tolerated


@dataclass(frozen=True)
class StatisticsCheck:
    """A check of channel statistics that leaves out clients whose mean or deviation lies far from the others'.

    Distances are taken to the medians of all clients by channel: of means in units of the median deviation, of
    deviations as the difference of logarithms, both as root mean square over channels. A client lies far out if one of
    them exceeds `factor` times the median of the other clients' distances, and 1.

    Attributes:
        factor: Factor by which honest clients may differ; they do, each with its own kinds of normal.
        liars: Share of clients that may be left out, at least one; if more lie far out, there is no telling which is
            honest, and all stay.
    """

    factor: float = 3.0
    liars: float = 0.2

    def __call__(
        self, updates: Mapping[int, Update], spec: MessageSpec, previous: Message
    ) -> tuple[dict[int, Update], list[str]]:
        """Leaves clients out; see `RobustAggregation`."""
        if not set(STATISTICS) <= set(spec) or len(updates) < 3:
            return dict(updates), []
        means = torch.stack([update.message["mean"].double() for update in updates.values()])
        variances = torch.stack([update.message["variance"].double() for update in updates.values()])
        # A constant channel has no deviation: a floor far below the usual one keeps its logarithm finite.
        floor = 1e-3 * variances.median(0).values.mean().sqrt() + torch.finfo(torch.float32).tiny
        deviations = variances.sqrt().clamp(min=floor)
        far: dict[int, str] = {}
        for what, distances in (
            ("mean", _distances(means / deviations.median(0).values)),
            ("deviation", _distances(deviations.log())),
        ):
            for client, own, others in _leave_one_out(list(updates), distances):
                usual = max(others, 1 / self.factor)
                if own > self.factor * usual:
                    far.setdefault(client, f"its channels' {what} lies {own / usual:.3g} times as far off")
        if len(far) > tolerated(self.liars, len(updates)):
            return dict(updates), [
                f"client {client} lies far out, but too many do to leave them out: {line} as the others'"
                for client, line in far.items()
            ]
        kept = {client: update for client, update in updates.items() if client not in far}
        return kept, [
            f"client {c} lies far out and is left out: {line} as the others'" for c, line in far.items()
        ]


def _distances(rows: Tensor) -> Tensor:
    """Returns the root mean square distance [N] of each row of [N, C] to the median row."""
    return (rows - rows.median(0).values).square().mean(1).sqrt()


def _leave_one_out(clients: list[int], distances: Tensor) -> list[tuple[int, float, float]]:
    """Returns by client its distance, and the median of the others'."""
    values = distances.tolist()
    return [
        (client, values[row], statistics.median(values[:row] + values[row + 1 :]))
        for row, client in enumerate(clients)
    ]
