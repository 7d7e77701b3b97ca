"""Conformal p-values and thresholds: from scores of normal images that the detector has not seen, to decisions.

If a new normal image is exchangeable with n normal images that were not used for training, then the rank of its score
among theirs is uniform, and calling images with a p-value of at most alpha anomalous raises a false alarm with a
probability of at most alpha (Vovk et al., Algorithmic Learning in a Random World, 2005; Laxhammar and Falkman, 2010).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lit_fedad.core.client_names import NUMBERS, ClientNames
from lit_fedad.core.errors import UserError
from lit_fedad.metrics.functional.bins import DEFAULT_BINS

USUAL_RATE = 0.01
"""Rate of false alarms that is promised where none is chosen and there are enough calibration scores."""

_ROUNDING = 1e-9
"""Tolerance of ranks: (n + 1) alpha is a whole number more often than its floating-point product."""


def needed_images(alpha: float) -> int:
    """Returns the fewest calibration images with which a rate of false alarms can be promised: 1 / alpha - 1.

    Args:
        alpha: The rate, in (0, 1).

    Example:
        >>> needed_images(0.01), needed_images(0.05), needed_images(0.3)
        (99, 19, 3)
    """
    return math.ceil(1 / alpha - _ROUNDING) - 1


@dataclass(frozen=True)
class ScoreCounts:
    """Counts of scores by bin (`LogBins`), which add up over clients and hold no single score.

    Attributes:
        bins: Ascending numbers of the bins that hold a score, int64 [m].
        counts: Number of scores in each, int64 [m].

    Example:
        >>> counts = ScoreCounts.of(torch.tensor([1.0, 2.0, 3.0, 4.0]))
        >>> counts.p_values(torch.tensor([0.5, 2.5, 9.0])).tolist()
        [1.0, 0.6, 0.2]
        >>> round(counts.threshold(0.4), 2), counts.threshold(0.1)
        (3.0, inf)
    """

    bins: Tensor
    counts: Tensor

    @classmethod
    def of(cls, scores: Tensor) -> ScoreCounts:
        """Counts scores [n] of any real dtype.

        Raises:
            UserError: If a score is NaN.
        """
        bins, counts = DEFAULT_BINS.index(scores).long().unique(return_counts=True)
        return cls(bins.cpu(), counts.cpu())

    @classmethod
    def union(cls, parts: Iterable[ScoreCounts]) -> ScoreCounts:
        """Adds counts up, in any order; the union of none is empty."""
        held = [part for part in parts if part.total]
        if not held:
            return cls(torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.int64))
        bins, place = torch.cat([part.bins for part in held]).unique(return_inverse=True)
        counts = torch.zeros(len(bins), dtype=torch.int64)
        return cls(bins, counts.index_add_(0, place, torch.cat([part.counts for part in held])))

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> ScoreCounts:
        """Reads what `to_json` returns.

        Raises:
            UserError: If it holds anything but ascending bins and their positive counts.
        """
        try:
            bins, counts = (torch.tensor(content[name], dtype=torch.int64) for name in ("bins", "counts"))
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise UserError("calibration: needs whole numbers as bins and counts") from error
        in_range = bins.ndim == 1 and bool(((bins >= 0) & (bins < DEFAULT_BINS.count)).all())
        if (
            bins.shape != counts.shape
            or not in_range
            or not bool((bins.diff() > 0).all() and (counts > 0).all())
        ):
            raise UserError("calibration: bins must ascend, each with a positive count")
        return cls(bins, counts)

    def to_json(self) -> dict[str, list[int]]:
        """Returns bins and counts as lists."""
        return {"bins": self.bins.tolist(), "counts": self.counts.tolist()}

    @property
    def total(self) -> int:
        """Number of scores."""
        return int(self.counts.sum())

    @property
    def edges(self) -> Tensor:
        """Largest score of each bin, float32 [m]: scores are rounded up to it, so that no p-value is too small."""
        return DEFAULT_BINS.upper(self.bins)

    def p_values(self, scores: Tensor) -> Tensor:
        """Computes conformal p-values: (1 + number of scores that are at least as large) / (n + 1).

        Args:
            scores: Scores of new images, any real dtype [k]; NaN is larger than all others.

        Returns:
            float64 [k], in (0, 1].
        """
        above = torch.cat([self.counts, self.counts.new_zeros(1)]).flip(0).cumsum(0).flip(0)
        first = torch.searchsorted(self.edges, scores.float().cpu().contiguous())
        return (1 + above[first]).double() / (self.total + 1)

    def rank(self, alpha: float) -> int:
        """Computes the rank of the threshold among n scores, ceil((n + 1)(1 - alpha)); n + 1 where there is none."""
        return math.ceil((self.total + 1) * (1 - alpha) - _ROUNDING)

    def threshold(self, alpha: float) -> float:
        """Computes the score above which p-values are at most alpha, that of `rank`.

        Returns:
            The threshold; infinity where there are fewer than `needed_images`.
        """
        rank = self.rank(alpha)
        if rank > self.total:
            return math.inf
        place = int((self.counts.cumsum(0) < max(rank, 1)).sum())
        return float(self.edges[place])


@dataclass(frozen=True)
class Source:
    """Calibration scores that a decision is based on.

    Attributes:
        of: Whose normal images they are, in words.
        scores: The scores.
    """

    of: str
    scores: ScoreCounts


@dataclass(frozen=True)
class Calibration:
    """Scores of normal images that no client's detector has seen, by client and product.

    Attributes:
        clients: Scores by client and product.
        shared: Whether all clients predict with one model. Only then do scores of different clients add up.
        names: What clients are called.

    Example:
        >>> scores = {"nut": ScoreCounts.of(torch.arange(1.0, 13))}
        >>> calibration = Calibration({0: scores, 1: scores}, shared=True)
        >>> source = calibration.source(0, alpha=0.05)
        >>> source.of, source.scores.total
        ('all clients', 24)
    """

    clients: Mapping[int, Mapping[str, ScoreCounts]]
    shared: bool
    names: ClientNames = NUMBERS

    def source(self, client: int, alpha: float, product: str | None = None) -> Source:
        """Chooses the calibration scores for a decision: the most specific that are enough for alpha.

        Of an image whose product is known these are that product's, over all clients where they share a model, and
        else those of all products; of another image the client's own, and else those of all clients.

        Args:
            client: The client that decides.
            alpha: Rate of false alarms.
            product: Product of the image, if it is known.

        Returns:
            The scores; where none are enough, the last choice, whose threshold is infinite.
        """
        own, everyone = [self.clients.get(client, {})], list(self.clients.values())
        choices = []
        if product is not None:
            holders, whose = (everyone, "all clients") if self.shared else (own, self.names.title(client))
            choices.append(Source(f"{product}, {whose}", _of_product(holders, product)))
            choices.append(Source(whose, _of_all(holders)))
        else:
            choices.append(Source(self.names.title(client), _of_all(own)))
            if self.shared:
                choices.append(Source("all clients", _of_all(everyone)))
        enough = (choice for choice in choices if choice.scores.total >= needed_images(alpha))
        return next(enough, choices[-1])

    def auto_rate(self) -> float:
        """Chooses the rate of false alarms to promise: `USUAL_RATE`, or else the smallest that every client can.

        n scores can promise 1 / (n + 1). Clients that share a model have the scores of all to fall back on; of clients
        with models of their own the one with fewest decides. Clients without scores can promise nothing and are left
        out.

        Returns:
            The rate, rounded up to three digits; `USUAL_RATE` where nobody has scores.

        Example:
            >>> two = {client: {"nut": ScoreCounts.of(torch.arange(1.0, 4))} for client in (0, 1)}
            >>> Calibration(two, shared=True).auto_rate(), Calibration(two, shared=False).auto_rate()
            (0.143, 0.25)
        """
        totals = [total for own in self.clients.values() if (total := _of_all([own]).total)]
        if not totals:
            return USUAL_RATE
        fewest = sum(totals) if self.shared else min(totals)
        return max(USUAL_RATE, _rounded_up(1 / (fewest + 1)))

    def threshold(self, client: int, alpha: float, product: str | None = None) -> float:
        """Computes the score above which a client calls an image anomalous; infinity where it cannot promise alpha."""
        return self.source(client, alpha, product).scores.threshold(alpha)

    def to_json(self) -> dict[str, Any]:
        """Returns all counts, as `from_json` reads them."""
        return {
            "shared": self.shared,
            "clients": {
                client: {product: counts.to_json() for product, counts in own.items()}
                for client, own in self.clients.items()
            },
        }

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Calibration:
        """Reads what `to_json` returns.

        Raises:
            UserError: If it is not of that form.
        """
        try:
            clients = {
                int(client): {str(product): ScoreCounts.from_json(counts) for product, counts in own.items()}
                for client, own in content["clients"].items()
            }
            return cls(clients, bool(content["shared"]))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise UserError("calibration: needs counts by client and product") from error


def wilson_interval(events: float, trials: float, z: float = 1.96) -> tuple[float, float]:
    """Computes the interval of a rate that was seen as events in a number of trials (Wilson, 1927).

    Args:
        events: Number of events.
        trials: Number of trials.
        z: Standard score of the confidence: 1.96 for 95 %.

    Returns:
        Lower and upper end; NaN without a trial.

    Example:
        >>> [round(end, 3) for end in wilson_interval(1, 100)]
        [0.002, 0.054]
    """
    if not trials:
        return math.nan, math.nan
    rate, spread = events / trials, z * z / trials
    centre = (rate + spread / 2) / (1 + spread)
    half = z / (1 + spread) * math.sqrt(rate * (1 - rate) / trials + spread / (4 * trials))
    return max(centre - half, 0.0), min(centre + half, 1.0)


def _rounded_up(rate: float, digits: int = 3) -> float:
    """Rounds a rate up to a number of digits, so that whoever can promise it still can."""
    places = digits - 1 - math.floor(math.log10(rate))
    return round(math.ceil(rate * 10**places - _ROUNDING) / 10**places, places)


def _of_product(holders: Sequence[Mapping[str, ScoreCounts]], product: str) -> ScoreCounts:
    return ScoreCounts.union(own[product] for own in holders if product in own)


def _of_all(holders: Sequence[Mapping[str, ScoreCounts]]) -> ScoreCounts:
    return ScoreCounts.union(counts for own in holders for counts in own.values())
