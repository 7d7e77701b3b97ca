"""MOON: the contrast by hand, and its gradient by differences."""

import numpy as np
import pytest
import torch

from lit_fedad.contracts.task import learned_state
from lit_fedad.methods.fedavg import FedAvgClient
from lit_fedad.methods.moon import MoonClient

MU, TEMPERATURE = 2.0, 0.5


def cosine(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Row by row; holds for complex a too, as complex steps need."""
    return (a * b).sum(1) / np.sqrt((a * a).sum(1)) / np.sqrt((b * b).sum(1))


def contrast_by_hand(own: np.ndarray, to_global: np.ndarray, previous: np.ndarray) -> np.ndarray:
    """``-log e^{cos(z, z_glob)/tau} / (e^{cos(z, z_glob)/tau} + e^{cos(z, z_prev)/tau})``, mean over images."""
    positive = np.exp(cosine(own, to_global) / TEMPERATURE)
    negative = np.exp(cosine(own, previous) / TEMPERATURE)
    return -np.log(positive / (positive + negative)).mean()


def by_complex_step(function, theta: np.ndarray, *constants: np.ndarray) -> np.ndarray:
    """The gradient of a real function in theta, to the last digit: ``Im f(theta + ih) / h``."""
    gradient = np.zeros_like(theta)
    for index in np.ndindex(theta.shape):
        moved = theta.astype(complex)
        moved[index] += 1e-30j
        gradient[index] = function(moved, *constants).imag / 1e-30
    return gradient


def moon_by_hand(hand, data, rounds: int) -> np.ndarray:
    """FedAvg on ``L + mu l_con``, features being ``theta (x, 1)`` themselves."""

    def loss(theta, x, y, received, last):
        own = x @ theta.T
        contrast = contrast_by_hand(own, x @ received.T, x @ last.T)
        return ((own - y) ** 2).sum(1).mean() / 2 + MU * contrast

    total = sum(len(loader.dataset) for loader in data.values())
    shared, previous = hand.start, dict.fromkeys(data, hand.start)
    for _ in range(rounds):
        for client, loader in data.items():
            theta = shared
            for x, y in hand.batches(loader):
                theta = theta - 0.1 * by_complex_step(loss, theta, x, y, shared, previous[client])
            previous[client] = theta
        shared = sum(len(data[c].dataset) / total * theta for c, theta in previous.items())
    return shared


@pytest.fixture
def moon(federate):
    """Plays MOON without a projection head, unless asked for one."""

    def play(task, data, client=None, **settings):
        client = {"mu": MU, "temperature": TEMPERATURE, "projection": None, **(client or {})}
        return federate(MoonClient, task=task, data=data, client=client, **settings)

    return play


@pytest.fixture
def in_training(make_linear):
    """A client in double precision amid training: its weights, those received and its last ones all differ."""
    torch.manual_seed(0)
    client = MoonClient(make_linear(), mu=MU, temperature=TEMPERATURE, projection=3).double()
    received = client.shared_state()
    client.previous = {n: entry + torch.randn_like(entry) / 2 for n, entry in received.items()}
    client.on_train_start()
    with torch.no_grad():
        for parameter in client.task.parameters():
            parameter += torch.randn_like(parameter) / 2
    return client


def loss_by_hand(client, batch) -> tuple[float, float]:
    """Loss and contrast of a client with a two-layer projection, from its weights alone."""

    def projected(state):
        w = {name: entry.detach().numpy() for name, entry in state.items()}
        features = batch["x"].numpy() @ w["layer.weight"].T + w["layer.bias"]
        hidden = np.maximum(features @ w["model_contrast.0.weight"].T + w["model_contrast.0.bias"], 0)
        return features, hidden @ w["model_contrast.2.weight"].T + w["model_contrast.2.bias"]

    features, own = projected(client.task.state_dict())
    contrast = contrast_by_hand(own, projected(client.received)[1], projected(client.previous)[1])
    task_loss = ((features - batch["y"].numpy()) ** 2).sum(1).mean() / 2
    return task_loss + MU * contrast, contrast


# ------------------------------------------------------------------------------------------ by hand


def test_loss_by_hand(in_training, make_points):
    batch = next(iter(make_points(6, batch_size=6)))
    outputs = in_training.training_step(batch)
    loss, contrast = loss_by_hand(in_training, batch)
    assert outputs["loss"].item() == pytest.approx(loss, rel=1e-12)
    assert outputs["contrast"].item() == pytest.approx(contrast, rel=1e-12)


def test_gradient_by_central_differences(in_training, make_points):
    """Reaches projection and features; the weights received and the last ones are constants."""
    batch = next(iter(make_points(6, batch_size=6)))
    in_training.training_step(batch)["loss"].backward()
    for parameter in in_training.task.parameters():
        flat, gradient = parameter.data.view(-1), parameter.grad.view(-1)
        for i in range(len(flat)):
            kept, sides = flat[i].item(), []
            for moved in (kept + 1e-6, kept - 1e-6):
                flat[i] = moved
                sides.append(loss_by_hand(in_training, batch)[0])
            flat[i] = kept
            assert gradient[i].item() == pytest.approx((sides[0] - sides[1]) / 2e-6, rel=1e-6, abs=1e-8)
    constants = [*in_training.received.values(), *in_training.previous.values()]
    assert not any(entry.requires_grad for entry in constants)


def test_three_rounds_by_hand(moon, make_linear, points_by_hand, hand):
    played = moon(make_linear(), points_by_hand)
    theta = hand.theta(played.server.weights)
    # In double precision, through exponentials: the last digits are open.
    np.testing.assert_allclose(theta, moon_by_hand(hand, points_by_hand, 3), rtol=1e-11)
    golden = [
        [0.29947829553869894, -0.81228031957347059, 0.21566559887604509],
        [0.61010663042236705, 1.9561933703625352, -0.36803780828648552],
    ]
    np.testing.assert_allclose(theta, golden, rtol=1e-11)  # worked out in 60 digits


# --------------------------------------------------------------------------------------- properties


def test_what_a_client_last_sent_is_what_it_moves_away_from(moon, make_linear, make_points, tap, exactly):
    """Also after rounds without it; it starts with the initial weights."""
    data = {client: make_points(3, seed=client) for client in range(3)}
    initial = dict(make_linear().state_dict())
    kept: dict[int, list] = {}

    def keep(federation, report):
        kept[report.round] = [federation.pool.get(client)["previous"] for client in data]

    played = moon(make_linear(), data, rounds=5, fraction=0.34, channel=tap, after_round=keep)
    last = dict.fromkeys(data, initial)
    for report in played.history:
        last.update(tap.uploads(report.round))
        for client in data:
            exactly(kept[report.round][client], dict(last[client]))


def test_the_models_compared_with_use_their_running_statistics(make_classifier, make_points):
    """And leave them, and the client's own, as they are."""
    torch.manual_seed(0)
    batch = next(iter(make_points(6, batch_size=6)))
    client = MoonClient(make_classifier(), mu=MU, temperature=TEMPERATURE, projection=None)
    references = [make_classifier(seed) for seed in (0, 1)]
    references[1].backbone = references[0].backbone
    for reference in references:
        reference(batch)  # statistics that are neither the batch's nor the initial ones
        reference.eval()
    client.received, client.previous = ({**learned_state(reference)} for reference in references)
    before = [reference.downsample[1].running_mean.clone() for reference in references]

    outputs = client.train().training_step(batch)

    with torch.no_grad():
        own = client.task.train()(batch).numpy()
        expected = contrast_by_hand(own, *(reference(batch).numpy() for reference in references))
    assert outputs["contrast"].item() == pytest.approx(expected, rel=1e-5)
    after = [state["downsample.1.running_mean"] for state in (client.received, client.previous)]
    assert all(torch.equal(*pair) for pair in zip(before, after, strict=True))


def test_comparing_models_leaves_the_clients_running_statistics_alone(moon, make_classifier, make_points):
    """They follow its own steps only, one a batch."""
    data = {0: make_points(6), 1: make_points(4, seed=1)}
    played = moon(make_classifier(), data, client={"projection": 4})
    assert played.server.weights["downsample.1.num_batches_tracked"].item() == 3 * 3


def test_the_projection_is_trained_and_averaged(moon, make_classifier, make_points, tap):
    data = {0: make_points(6), 1: make_points(2, seed=1)}
    played = moon(make_classifier(), data, client={"projection": 4}, channel=tap)
    name = "model_contrast.2.weight"
    one, other = (update[name].double().numpy() for update in tap.uploads(3).values())
    assert not np.array_equal(one, other)
    expected = (0.75 * one + 0.25 * other).astype(np.float32)
    np.testing.assert_array_equal(played.server.weights[name].numpy(), expected)


def test_last_weights_stay_at_home(moon, federate, make_classifier, make_points):
    data = {0: make_points(6), 1: make_points(4, seed=1)}
    report = moon(make_classifier(), data).history[-1]
    average = federate(FedAvgClient, task=make_classifier(), data=data).history[-1]
    assert (report.bytes_up, report.bytes_down) == (average.bytes_up, average.bytes_down)
