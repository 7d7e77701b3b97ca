"""Differential privacy of sums with Gaussian noise, in closed form (Gaussian DP).

A sum that one image changes by at most B, with noise N(0, (sigma B)^2), is mu-GDP with ``mu = 1 / sigma``; several such
sums of the same images are ``sqrt(mu_1^2 + mu_2^2 + ...)``-GDP (Dong, Roth and Su, JRSS B 2022, Corollary 3.3), also
where each was chosen by those before.
"""

from __future__ import annotations

import math

from scipy.optimize import brentq
from scipy.special import log_ndtr


def delta_of(epsilon: float, mu: float) -> float:
    """Computes the smallest delta of a mu-GDP release (Dong, Roth and Su, Corollary 2.13).

    ``delta = Phi(-epsilon / mu + mu / 2) - e^epsilon Phi(-epsilon / mu - mu / 2)``.

    Args:
        epsilon: Epsilon, at least 0.
        mu: mu, at least 0.
    """
    if mu == 0:
        return 0.0
    likely, unlikely = log_ndtr(-epsilon / mu + mu / 2), log_ndtr(-epsilon / mu - mu / 2)
    return max(0.0, math.exp(likely) - math.exp(epsilon + unlikely))


def epsilon_of(mu: float, delta: float) -> float:
    """Computes the smallest epsilon of a mu-GDP release at a delta.

    Args:
        mu: mu, at least 0.
        delta: delta, in (0, 1).

    Example:
        >>> round(epsilon_of(1.0, 1e-5), 3)
        4.377
    """
    if delta_of(0.0, mu) <= delta:
        return 0.0
    # The epsilon of the tail bound P(Z > t) <= exp(-t^2 / 2) is never too small.
    most = mu * mu / 2 + mu * math.sqrt(2 * math.log(1 / delta))
    return float(brentq(lambda epsilon: delta_of(epsilon, mu) - delta, 0.0, most, xtol=1e-12, rtol=1e-12))


def mu_of(epsilon: float, delta: float) -> float:
    """Computes the largest mu whose epsilon at a delta is no larger than the given one.

    Args:
        epsilon: Epsilon, above 0.
        delta: delta, in (0, 1).

    Example:
        >>> [round(mu_of(epsilon, 1e-5), 3) for epsilon in (1, 2, 4, 8)]
        [0.268, 0.502, 0.925, 1.666]
    """
    most = 1.0
    while delta_of(epsilon, most) < delta:
        most *= 2
    found = float(brentq(lambda mu: delta_of(epsilon, mu) - delta, 0.0, most, xtol=1e-13, rtol=1e-13))
    return found * (1 - 1e-9)  # the root may lie a last digit too high
