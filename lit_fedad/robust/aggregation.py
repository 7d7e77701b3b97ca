"""Robust aggregation: rules against clients that send false values in the declared form of a message."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from lit_fedad.contracts import Message, MessageSpec, Update
from lit_fedad.core.bounds import above, within
from lit_fedad.federation.aggregation import STATISTICS
from lit_fedad.federation.receiver import Remark, Robust, judged

Updates = Mapping[int, Update]
"""The clients' messages, by client."""

Judged = tuple[dict[int, Update], list[Remark]]
"""The result of a rule: the updates to merge, and remarks on clients."""


@dataclass(frozen=True)
class RobustAggregation:
    """The rules of a federation for several kinds of messages, applied in this order; None for no rule.

    A rule returns messages of other kinds unchanged.

    Attributes:
        statistics: Judges means and variances of channels.
        banks: Judges sets of vectors, such as memories and coresets.
        weights: Judges weights, or combines them in another way than by their mean.
    """

    statistics: Robust | None = None
    banks: Robust | None = None
    weights: Robust | None = None

    def __call__(self, updates: Updates, spec: MessageSpec, previous: Message) -> Judged:
        """Applies all rules; see `Robust`."""
        kept, remarks = dict(updates), list[Remark]()
        for rule in (self.statistics, self.banks, self.weights):
            if rule is not None and kept:
                kept, rule_remarks = judged(rule, kept, spec, previous)
                remarks += rule_remarks
        return kept, remarks


def tolerated(share: float, clients: int) -> int:
    """Computes how many lying clients a rule tolerates: a share of the clients, at least 1, but always a minority.

    Example:
        >>> [tolerated(0.2, clients) for clients in (1, 2, 3, 5, 10, 100)]
        [0, 0, 1, 1, 2, 20]
    """
    whole = int(share * clients + 1e-9)  # the product may lie just below a whole number
    return min(max(1, whole), max(0, clients - 1) // 2)


MOMENTS = ("count", "mean", "covariance")
"""Names of the moments that a client sends in one message for several sets of features."""

FLOOR = 0.3
"""Smallest deviation of a channel as a share of the mean deviation over channels; smaller ones are raised to it."""


@dataclass(frozen=True)
class StatisticsCheck:
    """A check of channel statistics that leaves out clients whose means or deviations lie far from the others'.

    A client is compared with the medians over all clients, channel by channel: the difference of means in units of the
    median deviation, and the logarithm of the ratio of deviations. The root mean square of both over channels is
    limited. Honest clients, each with its own kinds of normal images, reached 1.5 deviations and a ratio of 2.2
    (docs/lab/robust.md).

    Attributes:
        max_mean_shift: Largest difference of a client's means from the medians, in deviations.
        max_deviation_ratio: Largest factor by which its deviations may differ from the medians.
        malicious_share: Share of clients that may be left out, at least one client. If more are outliers, nothing tells
            which of them are honest, and all are kept.
    """

    max_mean_shift: float = 3.0
    max_deviation_ratio: float = 5.0
    malicious_share: float = 0.2

    def __post_init__(self) -> None:
        above("federation.robust.statistics", 0, max_mean_shift=self.max_mean_shift)
        above("federation.robust.statistics", 1, max_deviation_ratio=self.max_deviation_ratio)
        within("federation.robust.statistics", 0, 1, malicious_share=self.malicious_share)

    def __call__(self, updates: Updates, spec: MessageSpec, previous: Message) -> Judged:
        """Leaves clients out; see `RobustAggregation`."""
        if not (set(STATISTICS) <= set(spec) or set(MOMENTS) <= set(spec)):
            return dict(updates), []
        statistics = {client: _channels(update.message) for client, update in updates.items()}
        judged = [client for client, (mean, _) in statistics.items() if len(mean)]
        if len(judged) < 3:
            return dict(updates), []
        means, deviations = (torch.stack([statistics[client][i] for client in judged]) for i in (0, 1))
        # Small deviations are raised to a floor: channels that hardly vary have large ratios without a meaning.
        usual = deviations.median(0).values
        floor = (FLOOR * usual.mean()).clamp(min=torch.finfo(torch.float32).tiny)
        usual, deviations = usual.clamp(min=floor), deviations.clamp(min=floor)
        shifts = _root_mean_square((means - means.median(0).values) / usual)
        ratios = _root_mean_square((deviations / usual).log()).exp()
        far = {}
        for client, shift, ratio in zip(judged, shifts.tolist(), ratios.tolist(), strict=True):
            if shift > self.max_mean_shift:
                far[client] = f"is an outlier: its channels' means are {shift:.3g} standard deviations off"
            elif ratio > self.max_deviation_ratio:
                far[client] = (
                    f"is an outlier: its channels' standard deviations differ by a factor of {ratio:.3g}"
                )
        if len(far) > tolerated(self.malicious_share, len(judged)):
            return dict(updates), [
                (client, f"{line}; kept, as too many clients are outliers") for client, line in far.items()
            ]
        kept = {client: update for client, update in updates.items() if client not in far}
        return kept, [(client, f"{line}; left out") for client, line in far.items()]


def _channels(message: Message) -> tuple[Tensor, Tensor]:
    """Returns means and deviations of a message's channels, both [C], over all its sets; empty if all are empty."""
    if "variance" in message:
        return message["mean"].double(), message["variance"].double().sqrt()
    channels = message["mean"].shape[-1]
    rows = torch.arange(channels)
    # The diagonal of a covariance, of which the upper triangle is sent row by row.
    variances = message["covariance"][:, rows * (2 * channels - rows + 1) // 2].double()
    counts, means = message["count"], message["mean"].double()
    if not counts.any():
        return means.new_empty(0), means.new_empty(0)
    # Clients hold different products, so their sets cannot be compared one by one, but only all sets together.
    shares = (counts[counts > 0] / counts.sum()).double()
    mean = shares @ means
    return mean, (shares @ (variances + (means - mean).square())).clamp(min=0).sqrt()


def _root_mean_square(rows: Tensor) -> Tensor:
    """Computes the root mean square [n] of each row [n, C]."""
    return rows.square().mean(1).sqrt()
