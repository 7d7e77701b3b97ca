"""FedProx: the proximal gradient by hand."""

import numpy as np
import pytest

from lit_fedad.methods.fedprox import FedProxClient


def test_three_rounds_by_hand(federate, make_linear, points_by_hand, hand):
    """Every step follows ``g + mu (w - w^t)``."""
    mu, step, shares = 0.5, 0.1, {0: 3 / 5, 1: 2 / 5}
    shared = hand.start
    for _ in range(3):
        mean = np.zeros_like(shared)
        for client, loader in points_by_hand.items():
            theta = shared
            for x, y in hand.batches(loader):
                theta = theta - step * (hand.gradient(theta, x, y) + mu * (theta - shared))
            mean += shares[client] * theta
        shared = mean
    played = federate(FedProxClient, task=make_linear(), data=points_by_hand, client={"mu": mu})
    theta = hand.theta(played.server.weights)
    # In double precision; sums of another order leave the last bits open.
    np.testing.assert_allclose(theta, shared, rtol=1e-13)
    golden = [
        [0.295525878078125, -0.809090852328125, 0.212977517375],
        [0.59992442484375, 1.957168247125, -0.33528519371875],
    ]
    np.testing.assert_allclose(theta, golden, rtol=1e-13)  # exact: worked out in fractions


def test_the_distance_is_squared_and_tracked(federate, make_linear, points_by_hand, hand):
    """Client 0 makes two steps: the first at distance 0, the second at that of one gradient step."""
    played = federate(FedProxClient, task=make_linear(), data=points_by_hand, rounds=1, client={"mu": 0.5})
    x, y = hand.batches(points_by_hand[0])[0]
    squared = ((0.1 * hand.gradient(hand.start, x, y)) ** 2).sum()
    scalars = played.history[0].per_client
    assert scalars[0]["proximal"] == pytest.approx((0 + squared) / 2, rel=1e-12)
    assert scalars[1]["proximal"] == 0
