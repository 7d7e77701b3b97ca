"""Conformal p-values and thresholds: from scores of normal images that the detector has not seen, to decisions.

If a new normal image is exchangeable with n normal images that were not used for training, then the rank of its score
among theirs is uniform, and calling images with a p-value of at most alpha anomalous raises a false alarm with a
probability of at most alpha (Vovk et al., Algorithmic Learning in a Random World, 2005; Laxhammar and Falkman, 2010).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import Any, Literal

import torch
from torch import Tensor

from lit_fedad.core.client_names import NUMBERS, ClientNames
from lit_fedad.core.errors import UserError
from lit_fedad.metrics.functional.bins import DEFAULT_BINS

USUAL_RATE = 0.01
"""Rate of false alarms that is promised where none is chosen and there are enough calibration scores."""

SECOND_RATE = 0.05
"""Rate that is promised where none is chosen and the scores are too few for `USUAL_RATE`.

The smallest rate that they could promise would have the highest score as its threshold, so that one odd calibration
image would silence the detector.
"""

Alpha = float | Literal["auto"]
"""Promised rate of false alarms, in (0, 1); ``auto`` is what the deciding scores allow (`Calibration.rule`)."""

_MAX_COUNT = 1 << 31
"""Upper bound of the images in a bin, so that the counts of a file add up within 64 bits."""

_ROUNDING = 1e-9
"""Tolerance of ranks: (n + 1) alpha is a whole number more often than its floating-point product."""


def needed_images(alpha: float) -> int:
    """Returns the fewest calibration images with which a rate of false alarms can be promised: 1 / alpha - 1."""
    return math.ceil(min(1 / alpha, sys.float_info.max) - _ROUNDING) - 1


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
        filled = [part for part in parts if part.total]
        if not filled:
            return cls(torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.int64))
        bins, position = torch.cat([part.bins for part in filled]).unique(return_inverse=True)
        counts = torch.zeros(len(bins), dtype=torch.int64)
        return cls(bins, counts.index_add_(0, position, torch.cat([part.counts for part in filled])))

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
        counted = bins.shape == counts.shape and bool(((counts > 0) & (counts < _MAX_COUNT)).all())
        if not in_range or not counted or (bins.diff() <= 0).any():
            raise UserError("calibration: bins must ascend, each with a positive count of images")
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
        """Computes conformal p-values: (1 + number of scores that are at least as large) / (n + 1), float64 [k].

        ``scores`` are those of new images, of any real dtype [k]; NaN counts as larger than all others.
        """
        at_least = torch.cat([self.counts, self.counts.new_zeros(1)]).flip(0).cumsum(0).flip(0)
        position = torch.searchsorted(self.edges, scores.float().cpu().contiguous())
        return (1 + at_least[position]).double() / (self.total + 1)

    def rank(self, alpha: float) -> int:
        """Computes the rank of the threshold among n scores, ceil((n + 1)(1 - alpha)); n + 1 for no threshold."""
        return math.ceil((self.total + 1) * (1 - alpha) - _ROUNDING)

    def threshold(self, alpha: float) -> float:
        """Computes the score above which p-values are at most alpha; infinity with fewer than `needed_images`."""
        rank = self.rank(alpha)
        if rank > self.total:
            return math.inf
        position = int((self.counts.cumsum(0) < max(rank, 1)).sum())
        return float(self.edges[position])


@dataclass(frozen=True)
class DecisionRule:
    """A conformal decision: images with a p-value of at most alpha are anomalous.

    Attributes:
        of: Whose normal images calibrate the rule, in words.
        scores: Scores of these images.
        alpha: Promised rate of false alarms.
    """

    of: str
    scores: ScoreCounts
    alpha: float

    @cached_property
    def threshold(self) -> float:
        """Score above which images are anomalous; infinity where alpha cannot be promised."""
        return self.scores.threshold(self.alpha)

    @property
    def colour(self) -> float:
        """Score at the middle of heatmaps' colours: the threshold or, without one, the largest calibration score."""
        if math.isfinite(self.threshold):
            return self.threshold
        return float(self.scores.edges[-1]) if self.scores.total else 1.0

    def __str__(self) -> str:
        images = f"{self.scores.total} calibration images of {self.of}"
        if math.isfinite(self.threshold):
            return f"threshold {self.threshold:.4g}: at most {self.alpha:g} of normal images, by {images}"
        return f"{images} are too few to promise {self.alpha:g}: that takes {needed_images(self.alpha)}"


_NO_SCORES = ScoreCounts.union(())


@dataclass(frozen=True)
class Calibration:
    """Scores of normal images that no client's detector has seen, by client and product.

    Attributes:
        clients: Scores by client and product.
        shared: Whether all clients predict with one model. Only then do scores of different clients add up.
        names: What clients are called.
    """

    clients: Mapping[int, Mapping[str, ScoreCounts]]
    shared: bool
    names: ClientNames = NUMBERS
    # Sums of scores, which decisions about other products, by other clients and at other rates use again.
    _by_product: dict[int | None, dict[str, ScoreCounts]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    _few: dict[tuple[int | None, float], tuple[list[str], ScoreCounts]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @property
    def products(self) -> list[str]:
        """Lists the products that any client has calibrated with."""
        return sorted({name for scores in self.clients.values() for name in scores})

    def rule(self, client: int, alpha: Alpha, product: str | None = None) -> DecisionRule:
        """Chooses a client's rule for a decision, by the most specific calibration scores that are enough for alpha.

        For an image of a known product these are the product's scores, over all clients where they share a model; if
        they are too few, the scores of all products that have too few. For another image they are the client's own
        scores; if these are too few, those of all clients. Products with enough scores lend them to no other: by these
        the others might raise more false alarms than promised, while the lenders would raise no fewer, so that the
        promise would be broken over all products.

        Args:
            client: The client that decides.
            alpha: Rate of false alarms. ``auto`` is `automatic_rate` of the number of the most specific scores or,
                where these are too few for `SECOND_RATE`, of the number of those of the last choice.
            product: Product of the image, if it is known.

        Returns:
            The rule; where no scores are enough, that of the last choice, with an infinite threshold.
        """
        needed = needed_images(SECOND_RATE if isinstance(alpha, str) else alpha)
        if product is not None:
            holder, whose = (None, "all clients") if self.shared else (client, self.names.title(client))
            own_scores = self._of_products(holder).get(product, _NO_SCORES)
            few, together = self._of_few(holder, needed if own_scores.total else math.inf)
            named = f"{product}, {whose}" if few == [product] else f"{len(few)} products, {whose}"
            words = whose if len(few) == len(self._of_products(holder)) else named
            choices = [(f"{product}, {whose}", own_scores), (words, together)]
        else:
            choices = [(self.names.title(client), self._of_few(client, math.inf)[1])]
            if self.shared:
                choices.append(("all clients", self._of_few(None, math.inf)[1]))
        totals = [scores.total for _, scores in choices]
        rate = automatic_rate(totals[0 if totals[0] >= needed else -1]) if isinstance(alpha, str) else alpha
        enough = (choice for choice in choices if choice[1].total >= needed_images(rate))
        return DecisionRule(*next(enough, choices[-1]), rate)

    def threshold(self, client: int, alpha: Alpha, product: str | None = None) -> float:
        """Computes the score above which a client calls an image anomalous; infinity where it cannot promise alpha."""
        return self.rule(client, alpha, product).threshold

    def _of_products(self, client: int | None) -> Mapping[str, ScoreCounts]:
        """Returns the scores of each product, of one client or, for None, added up over all clients."""
        if client not in self._by_product:
            holders = list(self.clients.values()) if client is None else [self.clients.get(client, {})]
            self._by_product[client] = {
                name: ScoreCounts.union(own[name] for own in holders if name in own)
                for name in dict.fromkeys(chain(*holders))
            }
        return self._by_product[client]

    def _of_few(self, client: int | None, needed: float) -> tuple[list[str], ScoreCounts]:
        """Returns the products with fewer than ``needed`` scores, and these scores added up; infinity takes all."""
        key = client, needed
        if key not in self._few:
            scores = self._of_products(client)
            few = [name for name, own in scores.items() if own.total < needed]
            self._few[key] = few, ScoreCounts.union(scores[name] for name in few)
        return self._few[key]

    def to_json(self) -> dict[str, Any]:
        """Returns all counts, as `from_json` reads them."""
        return {
            "shared": self.shared,
            "clients": {
                client: {product: counts.to_json() for product, counts in by_product.items()}
                for client, by_product in self.clients.items()
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
                int(client): {
                    str(product): ScoreCounts.from_json(counts) for product, counts in by_product.items()
                }
                for client, by_product in content["clients"].items()
            }
            return cls(clients, bool(content["shared"]))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise UserError("calibration: needs counts by client and product") from error


def wilson_interval(events: float, trials: float) -> tuple[float, float]:
    """Computes the 95 % interval of a rate that was seen as events in a number of trials (Wilson, 1927).

    Returns:
        Lower and upper end; NaN without a trial.

    Example:
        >>> [round(end, 3) for end in wilson_interval(1, 100)]
        [0.002, 0.054]
    """
    if not trials:
        return math.nan, math.nan
    z = 1.96
    rate, spread = events / trials, z * z / trials
    centre = (rate + spread / 2) / (1 + spread)
    half = z / (1 + spread) * math.sqrt(rate * (1 - rate) / trials + spread / (4 * trials))
    return max(centre - half, 0.0), min(centre + half, 1.0)


def automatic_rate(number: int) -> float:
    """Chooses the rate of false alarms that a number of scores can promise, for users who choose none.

    Returns:
        `USUAL_RATE`, `SECOND_RATE`, or else the smallest that they can promise, 1 / (n + 1), up to three digits;
        `USUAL_RATE` where there are no scores, and thus no alarms.

    Example:
        >>> [automatic_rate(number) for number in (0, 9, 19, 99)]
        [0.01, 0.1, 0.05, 0.01]
    """
    if number == 0 or number >= needed_images(USUAL_RATE):
        return USUAL_RATE
    return max(SECOND_RATE, rounded_up(1 / (number + 1)))


def rounded_up(rate: float, digits: int = 3) -> float:
    """Rounds a rate up to a number of digits, so that scores which can promise it can promise the result."""
    decimals = digits - 1 - math.floor(math.log10(rate))
    return round(math.ceil(rate * 10**decimals - _ROUNDING) / 10**decimals, decimals)
