"""Drift of a stream of scores away from those of calibration images: a sequential test, and two descriptions.

Only the test keeps a promise over a stream of any length; Kolmogorov-Smirnov's test holds for one look, and the
population stability index is a description.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from scipy import stats
from torch import Tensor

from lit_fedad.contracts.randomness import numpy_generator
from lit_fedad.metrics.conformal import ScoreCounts
from lit_fedad.metrics.functional.bins import DEFAULT_BINS

_SLOPES = (-1.0, 0.0)
"""Slopes of the bets on small p-values, those of high scores. None is above 0, which would bet on low scores."""

_JUMP = 0.01
"""Share of the wealth that is dealt to all bets anew before each image (Vovk et al., 2021)."""

_TOP_SHARE = 0.05
"""Share of the calibration scores that count as top scores."""

_STAKES = (0.5, 0.8)
"""Shares of their wealth that the two bets on top scores stake on the image having a top score."""

_PSI_BINS = 10


@dataclass(frozen=True)
class Step:
    """Result of a drift test after an image.

    Attributes:
        p_value: The image's p-value among all images before it, in (0, 1].
        log_martingale: Logarithm, to base 10, of the test martingale.
        statistic: Shiryaev-Roberts statistic; 0 again after an alarm.
        alarm: Whether the statistic has reached the run length.
    """

    p_value: float
    log_martingale: float
    statistic: float
    alarm: bool


class DriftTest:
    """Sequential test of whether new images score no higher than the calibration images.

    The p-value of each image is its smoothed rank among the calibration images and all images of the stream before
    it. If all are exchangeable, these p-values are independent and uniform, however few calibration images there are
    (Vovk, Gammerman and Shafer, Algorithmic Learning in a Random World, 2005, theorem 8.1); p-values against a fixed
    calibration set are neither. A Simple Jumper bets against them, and the Shiryaev-Roberts statistic of its test
    martingale S, R_n = (R_{n-1} + 1) S_n / S_{n-1}, raises the alarms (Vovk et al., 2021, arXiv 2102.10439).

    The Simple Jumper has three bets, ``1 + e (p - 1/2)`` with e of -1, 0 and 1. That with e of 1 is left out: it would
    bet on low scores, under which decisions keep their promise all the more. Scores of calibration images lie a little
    high where they come from a model with these images left out. If new images differ only in scoring lower, their
    p-values are at least as large as uniform ones would be.

    Two further bets react at once to scores beyond nearly all that has been seen, as a new product has, and half of
    the images under another light: they stake a share s of .8 and .5 of their wealth on a top score of the image. Of
    N scores seen, c are top: the highest 5 % of the calibration scores, and each later image that was among the top
    ones. The image's score is one of them with probability ``q = (c + 1) / (N + 1)``, where ``p <= q``: a bet pays
    ``s / q`` then, and ``(1 - s) / (1 - q)`` otherwise. Its wealth is small while nothing happens, so that a single
    anomaly moves S little.

    If images are exchangeable, R_n - n is a martingale. So the first false alarm comes after at least `run_length`
    images in the mean, and the expected number of false alarms among the first m images is at most m / run_length, for
    every m. By Ville's inequality, S ever exceeds c with a probability of at most 1 / c.

    Args:
        calibration: Scores of the calibration images.
        run_length: Smallest mean number of images between false alarms.
        seed: Seed of the random ranks among equal scores, which are those of one bin.
    """

    def __init__(self, calibration: ScoreCounts, run_length: float = 10_000, seed: int = 0) -> None:
        self.run_length = run_length
        self._seen: list[int] = calibration.bins.repeat_interleave(calibration.counts).tolist()
        self._top = int(_TOP_SHARE * len(self._seen))
        self._rng = numpy_generator(seed, "ranks among equal scores")
        bets = len(_SLOPES) + len(_STAKES)
        self._wealth = [1 / bets] * bets
        self._log_martingale = self._statistic = 0.0

    def add(self, scores: Sequence[float]) -> list[Step]:
        """Takes the scores of the next images into account, one after the other.

        Raises:
            UserError: If a score is NaN.
        """
        return [
            self._step(self._rank(score_bin))
            for score_bin in DEFAULT_BINS.index(torch.tensor(scores)).tolist()
        ]

    def _step(self, p_value: float) -> Step:
        q = (self._top + 1) / len(self._seen)
        top = p_value <= q < 1
        self._top += top
        payoffs = [1 + slope * (p_value - 0.5) for slope in _SLOPES]
        payoffs += [1.0 if q == 1 else stake / q if top else (1 - stake) / (1 - q) for stake in _STAKES]
        bets = [
            ((1 - _JUMP) * wealth + _JUMP / len(payoffs)) * payoff
            for payoff, wealth in zip(payoffs, self._wealth, strict=True)
        ]
        gain = sum(bets)
        self._wealth = [bet / gain for bet in bets]
        self._log_martingale += math.log10(gain)
        statistic = (self._statistic + 1) * gain
        alarm = statistic >= self.run_length
        self._statistic = 0.0 if alarm else statistic
        return Step(p_value, self._log_martingale, self._statistic, alarm)

    def _rank(self, score_bin: int) -> float:
        """Computes the p-value of a score, given its bin, and adds it to the scores that have been seen."""
        first, last = bisect_left(self._seen, score_bin), bisect_right(self._seen, score_bin)
        above, equal = len(self._seen) - last, last - first + 1
        insort(self._seen, score_bin)
        return float(above + (1 - self._rng.random()) * equal) / len(self._seen)


def uniformity(p_values: Sequence[float]) -> tuple[float, float]:
    """Tests whether independent p-values are uniform (Kolmogorov-Smirnov).

    Returns:
        The largest difference of the distribution functions, and its own p-value, for one look; NaN without p-values.
    """
    if not len(p_values):
        return math.nan, math.nan
    result = stats.kstest(p_values, "uniform")
    return float(result.statistic), float(result.pvalue)


@dataclass(frozen=True)
class Stability:
    """Population stability index of scores against calibration scores, and what it is made of.

    Attributes:
        expected: Number of calibration scores in each of at most ten bins, which hold about equally many.
        seen: Number of the other scores in each of these bins.
    """

    expected: tuple[int, ...]
    seen: tuple[int, ...]

    @classmethod
    def of(cls, calibration: ScoreCounts, scores: Tensor) -> Stability:
        """Counts scores [k] in quantile bins of the calibration scores."""
        middle = calibration.counts.cumsum(0) - calibration.counts / 2
        quantile = (middle * _PSI_BINS / max(calibration.total, 1)).long()
        groups, group_of_bin = quantile.unique(return_inverse=True)  # ascending, as the scores are
        expected = torch.zeros(len(groups), dtype=torch.int64).index_add_(0, group_of_bin, calibration.counts)
        last = torch.cat([group_of_bin.diff() > 0, torch.ones(1, dtype=torch.bool)]).nonzero()[:, 0]
        upper = calibration.bins[last[:-1]]
        group_of_score = torch.searchsorted(upper, DEFAULT_BINS.index(scores).long().cpu())
        seen = torch.bincount(group_of_score, minlength=len(groups))
        return cls(tuple(expected.tolist()), tuple(seen.tolist()))

    @property
    def index(self) -> float:
        """Sum of (q - p) log(q / p), with shares p expected and q seen, to each of whose counts a half is added."""
        p, q = (
            (np.array(counts) + 0.5) / (sum(counts) + 0.5 * len(counts))
            for counts in (self.expected, self.seen)
        )
        return float(((q - p) * np.log(q / p)).sum())

    @property
    def limit(self) -> float:
        """Value that the index stays below with a probability of about 95 % where nothing has changed.

        The index over (1 / n + 1 / m) is then about chi-squared (Yurdakul and Naranjo, 2020): with few images it is
        large without any drift, and the usual limits of .1 and .25 say nothing.
        """
        if not sum(self.seen):
            return math.nan
        spread = 1 / sum(self.expected) + 1 / sum(self.seen)
        return float(spread * stats.chi2.ppf(0.95, max(len(self.expected) - 1, 1)))
