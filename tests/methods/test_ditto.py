"""Ditto: shared and personal models by hand, with half of the clients in a round."""

import numpy as np

from lit_fedad.methods.ditto import DittoClient

STEP, LAM = 0.1, 0.6


def by_hand(hand, data, participants):
    """Li et al., Algorithm 1, averaged by images, with as many personal as shared steps: w, and each client's v."""
    w, personal = hand.start, dict.fromkeys(data, hand.start)
    for picked in participants:
        total, images = np.zeros_like(w), sum(len(data[client].dataset) for client in picked)
        for client in picked:
            y, v = w, personal[client]
            for points, targets in hand.batches(data[client]):
                y = y - STEP * hand.gradient(y, points, targets)
                v = v - STEP * (hand.gradient(v, points, targets) + LAM * (v - w))
            total, personal[client] = total + len(data[client].dataset) / images * y, v
        w = total
    return w, personal


def test_rounds_by_hand_with_half_of_the_clients(federate, make_linear, make_points, hand):
    data = {client: make_points(2 + client, seed=client) for client in range(4)}
    settings = {"client": {"lam": LAM}, "rounds": 4, "fraction": 0.5}
    played = federate(DittoClient, task=make_linear(), data=data, **settings)
    participants = [report.participants for report in played.history]
    assert all(len(picked) == 2 for picked in participants)
    w, personal = by_hand(hand, data, participants)
    np.testing.assert_allclose(hand.theta(played.server.weights), w, rtol=1e-12)
    for client, v in personal.items():
        np.testing.assert_allclose(hand.theta(played.pool.get(client)["personal_entries"]), v, rtol=1e-12)
        np.testing.assert_allclose(hand.theta(played.history[-1].metrics[client]), v, rtol=1e-12)
