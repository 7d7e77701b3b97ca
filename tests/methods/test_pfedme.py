"""pFedMe: shared and personal models by hand, with half of the clients in a round."""

from functools import partial

import numpy as np
import torch

from lit_fedad.methods.pfedme import PFedMeClient

STEP, LAM, ETA, BETA, INNER = 0.1, 3.0, 0.05, 1.5, 3


def by_hand(hand, data, participants):
    """Dinh et al., Algorithm 1, with K gradient steps for theta, from the theta of the batch before."""
    w, personal = hand.start, {}
    for picked in participants:
        total, images = np.zeros_like(w), sum(len(data[client].dataset) for client in picked)
        for client in picked:
            own = theta = w
            for points, targets in hand.batches(data[client]):
                for _ in range(INNER):
                    theta = theta - STEP * (hand.gradient(theta, points, targets) + LAM * (theta - own))
                own = own - ETA * LAM * (own - theta)
            total, personal[client] = total + len(data[client].dataset) / images * own, theta
        w = (1 - BETA) * w + BETA * total
    return w, personal


def test_rounds_by_hand_with_half_of_the_clients(federate, make_linear, make_points, hand):
    data = {client: make_points(2 + client, seed=client) for client in range(4)}
    played = federate(
        PFedMeClient,
        task=make_linear(),
        data=data,
        client={"lam": LAM, "inner_steps": INNER, "learning_rate": ETA},
        server={"server_optimizer": partial(torch.optim.SGD, lr=BETA)},
        rounds=4,
        fraction=0.5,
    )
    participants = [report.participants for report in played.history]
    assert all(len(picked) == 2 for picked in participants)
    w, personal = by_hand(hand, data, participants)
    np.testing.assert_allclose(hand.theta(played.server.weights), w, rtol=1e-12)
    for client in data:  # one that has not taken part predicts with the shared model
        answer = hand.theta(played.history[-1].metrics[client])
        np.testing.assert_allclose(answer, personal.get(client, w), rtol=1e-12)
