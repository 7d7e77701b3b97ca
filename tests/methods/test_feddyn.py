"""FedDyn: Algorithm 1 by hand, with half of the clients in a round."""

import numpy as np

from lit_fedad.methods.feddyn import FedDynClient, FedDynServer

STEP, ALPHA = 0.1, 0.4


def by_hand(hand, data, participants):
    """Acar et al., Algorithm 1: weights, h, and the clients' gradients."""
    theta, h = hand.start, np.zeros_like(hand.start)
    gradients = dict.fromkeys(data, h)
    for picked in participants:
        trained = []
        for client in picked:
            own = theta
            for points, targets in hand.batches(data[client]):
                penalty = ALPHA * (own - theta) - gradients[client]
                own = own - STEP * (hand.gradient(own, points, targets) + penalty)
            gradients = {**gradients, client: gradients[client] - ALPHA * (own - theta)}
            trained.append(own)
        h = h - ALPHA / len(data) * sum(own - theta for own in trained)
        theta = sum(trained) / len(trained) - h / ALPHA
    return theta, h, gradients


def test_rounds_by_hand_with_half_of_the_clients(federate, make_linear, make_points, hand):
    data = {client: make_points(2 + client, seed=client) for client in range(4)}
    settings = {"client": {"alpha": ALPHA}, "rounds": 5, "fraction": 0.5}
    played = federate(FedDynClient, FedDynServer, task=make_linear(), data=data, **settings)
    participants = [report.participants for report in played.history]
    assert all(len(picked) == 2 for picked in participants)
    assert set().union(*participants) == set(data)
    theta, h, gradients = by_hand(hand, data, participants)
    close = {"rtol": 1e-11, "atol": 1e-13}
    np.testing.assert_allclose(hand.theta(played.server.weights), theta, **close)
    np.testing.assert_allclose(ALPHA * hand.theta(played.server.correction), h, **close)
    for client, gradient in gradients.items():
        np.testing.assert_allclose(hand.theta(played.pool.get(client)["gradient"]), gradient, **close)
    # h is the mean of the gradients; one who joins has 0.
    np.testing.assert_allclose(h, np.mean(list(gradients.values()), axis=0), **close)
    played.server.register_clients(dict.fromkeys(range(5), 2))
    np.testing.assert_allclose(ALPHA * hand.theta(played.server.correction), h * 4 / 5, **close)
