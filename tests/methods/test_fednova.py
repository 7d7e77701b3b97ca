"""FedNova: rounds by hand, with and without momentum, and what an observer gets back from an upload."""

import numpy as np
import pytest
import torch

from lit_fedad.contracts import Update
from lit_fedad.core.errors import UserError
from lit_fedad.federation.channel import Byte, Channel, Plain
from lit_fedad.federation.message_check import outliers
from lit_fedad.methods.fednova import FedNovaClient, FedNovaServer, predict_with_weights

STEP = 0.1


def by_hand(hand, data, momentum, participants):
    """Wang et al., Eq. 7 and Sec. 4: a_i counts how often each gradient is in the client's change."""
    x = hand.start
    for picked in participants:
        images = {client: len(data[client].dataset) for client in picked}
        shares = {client: number / sum(images.values()) for client, number in images.items()}
        change, tau = np.zeros_like(x), 0.0
        for client in picked:
            y, velocity, batches = x, np.zeros_like(x), hand.batches(data[client])
            for points, targets in batches:
                velocity = momentum * velocity + hand.gradient(y, points, targets)
                y = y - STEP * velocity
            a = [sum(momentum**j for j in range(len(batches) - k)) for k in range(len(batches))]
            change += shares[client] * (y - x) / sum(a)
            tau += shares[client] * sum(a)
        x = x + tau * change
    return x


@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_rounds_by_hand_with_half_of_the_clients(federate, make_linear, make_points, hand, momentum):
    class WithMomentum(make_linear):
        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=STEP, momentum=momentum)

    data = {client: make_points(1 + 2 * client, seed=client) for client in range(4)}
    played = federate(FedNovaClient, FedNovaServer, task=WithMomentum(), data=data, rounds=4, fraction=0.5)
    participants = [report.participants for report in played.history]
    assert all(len(picked) == 2 for picked in participants)
    expected = by_hand(hand, data, momentum, participants)
    # Lengths and messages are float32 on the way: the length is exact, the mean step is in double.
    np.testing.assert_allclose(hand.theta(played.server.weights), expected, rtol=1e-7)


def test_with_an_optimiser_without_momentum_the_length_is_the_number_of_steps(
    federate, make_linear, make_points, tap
):
    class WithAdam(make_linear):
        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters())

    federate(FedNovaClient, FedNovaServer, task=WithAdam(), data={0: make_points(5)}, rounds=2, channel=tap)
    assert [tap.uploads(round)[0]["length"].item() for round in (1, 2)] == [3, 3]


def test_a_client_with_a_thousand_times_as_many_steps_is_no_outlier(make_linear):
    client = FedNovaClient(make_linear())
    sent = {one: Update({"length": torch.tensor(1.0 + 1000 * one)}, 1 + 1000 * one) for one in range(2)}
    assert outliers(sent, {}, 30, {"length": client.upload_spec()["length"]}) == {}


def test_an_upload_shows_the_trained_weights(federate, make_linear, points_by_hand, hand, tap):
    parts = {"task": make_linear(), "data": points_by_hand, "rounds": 1}
    played = federate(FedNovaClient, FedNovaServer, **parts, channel=tap)
    y = hand.start
    for points, targets in hand.batches(points_by_hand[0]):
        y = y - STEP * hand.gradient(y, points, targets)
    server = FedNovaServer(FedNovaClient(make_linear()))
    predict_with_weights(server, played.client, Update(tap.uploads(1)[0], 3))
    np.testing.assert_allclose(hand.theta(played.client.task.state_dict()), y, rtol=1e-7)


def test_no_codec_rounds_the_weights(federate, make_classifier, make_points, exactly):
    """The server would take the error of rounding as often as clients take steps."""
    played = [
        federate(
            FedNovaClient,
            FedNovaServer,
            task=make_classifier(),
            data={0: make_points(6), 1: make_points(4, seed=1)},
            rounds=2,
            channel=Channel(codec, codec),
        )
        for codec in (Byte(), Plain())
    ]
    exactly(*(one.server.weights for one in played))


def test_an_exaggerated_length_is_refused(make_linear):
    client = FedNovaClient(make_linear(), local_epochs=2)
    server = FedNovaServer(client)
    server.validate(0, Update({"length": torch.tensor(6.0)}, 3))
    with pytest.raises(UserError, match="a way of 7 steps, and its images allow 6"):
        server.validate(0, Update({"length": torch.tensor(7.0)}, 3))


def test_steps_that_never_fade_are_refused_in_one_line(make_linear):
    class Endless(make_linear):
        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=STEP, momentum=1.0)

    with pytest.raises(UserError, match=r"^task\.momentum=1\.0 must be at least 0 and below 1$"):
        FedNovaServer(FedNovaClient(Endless()))
