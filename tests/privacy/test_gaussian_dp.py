"""Gaussian DP: the closed form against an integral, against dp-accounting where it is installed, and its inverses."""

import itertools
import math

import numpy as np
import pytest
from scipy.integrate import quad
from scipy.stats import norm

from lit_fedad.privacy.image_privacy import delta_of, epsilon_of, mu_of

# Noise multiplier, number of releases, delta.
SETTINGS = [
    (0.6, 1, 1e-5), (1.08, 1, 1e-5), (2.0, 1, 1e-6), (3.73, 1, 1e-5), (2.0, 4, 1e-5),
    (5.0, 10, 1e-5), (1.0, 3, 1e-4), (10.0, 50, 1e-6), (6.3, 10, 1e-3), (20.0, 7, 1e-8),
]  # fmt: skip


def hockey_stick(epsilon, mu):
    """``integral of max(0, p - e^epsilon q)`` of N(mu, 1) and N(0, 1), by quadrature."""
    start = epsilon / mu + mu / 2  # where p = e^epsilon q
    return quad(lambda x: norm.pdf(x - mu) - math.exp(epsilon) * norm.pdf(x), start, start + 40, epsabs=0)[0]


@pytest.mark.parametrize(
    ("sigma", "releases", "delta"),
    [*SETTINGS, (0.1, 1, 1e-5), (10.0, 1, 1e-3)],  # epsilon 93 and 0.2
)
def test_epsilon_is_that_of_the_integral(sigma, releases, delta):
    mu = math.sqrt(releases) / sigma
    epsilon = epsilon_of(mu, delta)
    assert hockey_stick(epsilon, mu) == pytest.approx(delta, rel=1e-5)
    assert mu_of(epsilon, delta) == pytest.approx(mu, rel=1e-6)
    assert epsilon_of(mu_of(epsilon, delta), delta) <= epsilon


@pytest.mark.slow
@pytest.mark.parametrize(("sigma", "releases", "delta"), SETTINGS)
def test_epsilon_is_that_of_dp_accounting(sigma, releases, delta):
    losses = pytest.importorskip("dp_accounting.pld.privacy_loss_distribution")
    pld = losses.from_gaussian_mechanism(sigma).self_compose(releases)
    expected = pld.get_epsilon_for_delta(delta)
    assert epsilon_of(math.sqrt(releases) / sigma, delta) == pytest.approx(expected, abs=1e-3)


def test_limits():
    assert delta_of(1.0, 0.0) == 0.0
    assert epsilon_of(0.0, 1e-5) == 0.0
    assert delta_of(0.0, 2.0) == pytest.approx(2 * norm.cdf(1.0) - 1)
    deltas = [delta_of(epsilon, 1.0) for epsilon in np.linspace(0, 30, 61)]
    assert all(later <= earlier for earlier, later in itertools.pairwise(deltas))
