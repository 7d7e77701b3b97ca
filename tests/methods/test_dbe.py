"""DBE: the paper's numbers, its limits, and a bias that stays personal."""

from functools import partial

import numpy as np
import pytest
import torch
from safetensors.torch import save
from torch import nn
from torch.utils.data import DataLoader

from lit_fedad.memory.reduce import SampleReduce
from lit_fedad.methods.dbe import MEAN, DBEClient, DBEServer
from lit_fedad.methods.fedavg import FedAvgClient
from lit_fedad.tasks.autoencoder import Autoencoder
from lit_fedad.tasks.classifier import Classifier

POINTS = {
    0: [([1.0, 0.5], [0.0, 1.0]), ([-0.5, 2.0], [1.0, 0.0]), ([0.25, -1.0], [0.5, 0.5])],
    1: [([2.0, 1.0], [-1.0, 0.5])],
}
INITIAL = np.array([[0.5, -1.0, 0.125], [0.25, 2.0, -0.5]])  # weight and bias of the task, side by side
STEP, BATCH, ROUNDS = 0.1, 2, 3

exactly = partial(torch.testing.assert_close, rtol=0, atol=0)
# The method keeps its bias and means in single precision, as features come.
nearly = partial(np.testing.assert_allclose, rtol=2e-5, atol=1e-6)


def loaders(points):
    return {
        client: DataLoader([{"x": torch.tensor(x), "y": torch.tensor(y)} for x, y in rows], BATCH)
        for client, rows in points.items()
    }


def batches(rows, size=BATCH):
    """Inputs with a column of ones, and targets."""
    for start in range(0, len(rows), size):
        x, y = (np.array(column) for column in zip(*rows[start : start + size], strict=True))
        yield np.column_stack([x, np.ones(len(x))]), y


def side_by_side(state):
    return np.column_stack([state["layer.weight"].numpy(), state["layer.bias"].numpy()])


def by_hand(points, kappa, momentum):
    """Server's weights, g, and each client's bias and running mean after three rounds."""
    total = sum(map(len, points.values()))
    running = {
        client: (x @ INITIAL.T).mean(0)
        for client, rows in points.items()
        for x, _ in batches(rows, len(rows))
    }
    common = sum(len(points[client]) / total * mean for client, mean in running.items())
    shared, bias, trained = INITIAL, dict.fromkeys(points, np.zeros(2)), {}
    for _ in range(ROUNDS):
        for client, rows in points.items():
            w = shared
            for x, y in batches(rows):
                features = x @ w.T
                running[client] = (1 - momentum) * running[client] + momentum * features.mean(0)
                error = (features + bias[client] - y) / len(x)
                # The mean over two channels of (r - g)^2 / 2; a feature's share in r is momentum / batch.
                drift = (running[client] - common) / 2 * momentum / len(x)
                w = w - STEP * (error + kappa * drift).T @ x
                bias[client] = bias[client] - STEP * error.sum(0)
            trained[client] = w
        shared = sum(len(points[client]) / total * w for client, w in trained.items())
    return shared, common, bias, running


def fix_bias(task):
    """Leaves the personal bias out of the optimiser."""
    own = [p for p in task.parameters() if p.requires_grad]
    task.configure_optimizers = lambda: torch.optim.SGD(own, lr=0.1, momentum=0.9)
    return task


@pytest.fixture
def dbe(federate, make_linear):
    """Plays DBE on the linear task, in single precision."""

    def play(points, rounds=ROUNDS, client=None, **settings):
        task = make_linear(dtype=torch.float32)
        return federate(
            DBEClient, DBEServer, task=task, data=loaders(points), rounds=rounds, client=client, **settings
        )

    return play


@pytest.fixture(params=["classifier", "memory bank"])
def play(request, federate, make_classifier, make_points, make_task, make_loader):
    """Plays three rounds of two clients, on either task."""

    def play(**settings):
        if request.param == "classifier":
            task, data = make_classifier(), {c: make_points(4, c, dtype=torch.float32) for c in range(2)}
        else:
            task, data = make_task(learning_rate=0.01), {c: make_loader(3, c) for c in range(2)}
        client = {"kappa": 2.0, "momentum": 0.3}
        return federate(DBEClient, DBEServer, task=task, data=data, shuffle=True, client=client, **settings)

    return play


@pytest.mark.parametrize("points", [POINTS, {0: POINTS[0]}, {0: POINTS[0], 1: POINTS[0]}])
@pytest.mark.parametrize(("kappa", "momentum"), [(1.0, 1.0), (4.0, 0.3), (0.0, 1.0)])
def test_three_rounds_are_the_papers(dbe, points, kappa, momentum):
    played = dbe(points, client={"kappa": kappa, "momentum": momentum})
    shared, common, bias, running = by_hand(points, kappa, momentum)
    nearly(side_by_side(played.server.weights), shared)
    nearly(played.server.common, common)
    for client in points:
        own = played.pool.get(client)
        assert set(own["task"]) == {"offset.bias"}
        nearly(own["task"]["offset.bias"], bias[client])
        nearly(own["running"], running[client])


def test_one_step_in_numbers(dbe):
    """Points (1, 2) and (0, 1) with y = 0: initial features (-1.375, 3.75) and (-0.875, 1.5)."""
    rows = [([1.0, 2.0], [0.0, 0.0]), ([0.0, 1.0], [0.0, 0.0])]
    played = dbe({0: rows[:1] * 3, 1: rows[1:]}, rounds=1, client={"kappa": 0.8, "momentum": 1.0})
    # g = (3 * -1.375 + -0.875) / 4 and (3 * 3.75 + 1.5) / 4
    exactly(played.server.common, torch.tensor([-1.25, 3.1875]))
    # Client 1: error (-0.875, 1.5), r - g = (0.375, -1.6875); the bias moves by the error alone.
    exactly(played.pool.get(1)["running"], torch.tensor([-0.875, 1.5]))
    nearly(played.pool.get(1)["task"]["offset.bias"], [0.0875, -0.15])
    assert played.history[-1].per_client[1]["drift"] == pytest.approx((0.375**2 + 1.6875**2) / 4)
    assert played.history[-1].per_client[1]["loss"] == pytest.approx(
        (0.875**2 + 1.5**2) / 2 + 0.8 * (0.375**2 + 1.6875**2) / 4
    )


def test_with_neither_regulariser_nor_bias_it_is_fedavg(federate, make_classifier, make_points):
    data = {c: make_points(4 + 2 * c, c, dtype=torch.float32) for c in range(2)}
    ours = federate(
        DBEClient,
        DBEServer,
        task=fix_bias(make_classifier()),
        data=data,
        shuffle=True,
        client={"kappa": 0.0},
    )
    theirs = federate(FedAvgClient, task=make_classifier(), data=data, shuffle=True)
    exactly(ours.server.weights, theirs.server.weights)
    for client in data:
        exactly(ours.pool.get(client)["task"]["offset.bias"], torch.zeros(3))
        predicts = ours.history[-1].metrics[client]
        exactly({n: e for n, e in predicts.items() if n != "offset.bias"}, theirs.history[-1].metrics[client])


def test_without_the_regulariser_the_bias_is_still_free(dbe, federate, make_linear):
    ours = dbe(POINTS, client={"kappa": 0.0})
    theirs = federate(FedAvgClient, task=make_linear(dtype=torch.float32), data=loaders(POINTS))
    one, other = (ours.pool.get(client)["task"]["offset.bias"] for client in POINTS)
    assert one.all()
    assert not torch.equal(one, other)
    assert not torch.equal(ours.server.weights["layer.bias"], theirs.server.weights["layer.bias"])


def test_the_regulariser_alone_moves_features_to_the_common_mean(federate, make_linear):
    gaps = []
    for kappa in (0.0, 10.0):
        task = fix_bias(make_linear(dtype=torch.float32))
        data = loaders(POINTS)
        played = federate(DBEClient, DBEServer, task=task, data=data, rounds=1, client={"kappa": kappa})
        gaps.append((played.pool.get(0)["running"] - played.server.common).norm())
    assert gaps[1] < gaps[0]


def test_common_mean_is_that_of_all_images_under_the_initial_weights_and_stays(
    federate, make_classifier, make_points
):
    data = {c: make_points(4 + 2 * c, c, dtype=torch.float32) for c in range(2)}
    played = [
        federate(DBEClient, DBEServer, task=make_classifier(), data=data, rounds=rounds) for rounds in (0, 3)
    ]
    task = make_classifier().eval()
    with torch.no_grad():
        rows = torch.cat([task.encode(batch) for loader in data.values() for batch in loader])
    nearly(played[0].server.common, rows.mean(0))
    exactly(played[0].server.common, played[1].server.common)


def test_identical_clients_are_one_client(dbe):
    many, one = (dbe(dict.fromkeys(range(n), POINTS[0])) for n in (2, 1))
    exactly(many.server.weights, one.server.weights)
    exactly(many.server.common, one.server.common)
    exactly(many.pool.get(1), one.pool.get(0))


def test_order_of_clients_does_not_matter(dbe):
    points = {0: POINTS[0], 1: POINTS[1], 2: POINTS[0][:2]}
    places = {0: 2, 1: 0, 2: 1}
    given, moved = dbe(points), dbe({new: points[old] for old, new in places.items()})
    # The server adds in another order, in double precision, and rounds to single.
    torch.testing.assert_close(moved.server.weights, given.server.weights)
    torch.testing.assert_close(moved.server.common, given.server.common)
    for old, new in places.items():
        torch.testing.assert_close(moved.pool.get(new), given.pool.get(old))


def test_means_cross_once_and_biases_never(dbe):
    played = dbe(POINTS)
    once, *rounds = played.history
    weights = {"layer.weight": torch.zeros(2, 2), "layer.bias": torch.zeros(2)}
    mean = {MEAN: torch.zeros(2)}
    assert (once.round, once.phase) == (0, "mean")
    assert once.bytes_up == dict.fromkeys(POINTS, len(save(mean)))
    assert once.elements_up == dict.fromkeys(POINTS, 2)
    assert once.bytes_down == dict.fromkeys(POINTS, 0)
    for report in rounds:
        assert report.bytes_up == dict.fromkeys(POINTS, len(save(weights)))
        assert report.bytes_down == dict.fromkeys(POINTS, len(save({**weights, **mean})))


def test_an_absent_client_keeps_its_own(dbe):
    short, long = (dbe(POINTS, rounds=rounds, fraction=0.5) for rounds in (1, 2))
    (present,), (later,) = (report.participants for report in long.history[-2:])
    assert present != later
    assert short.pool.get(present)["task"]["offset.bias"].all()
    exactly(long.pool.get(present), short.pool.get(present))
    exactly(short.pool.get(later)["task"]["offset.bias"], torch.zeros(2))


def test_predicts_with_its_own_bias(federate, make_linear):
    played = federate(
        DBEClient,
        DBEServer,
        task=make_linear(dtype=torch.float32),
        data=loaders(POINTS),
        question=lambda client, number: client.predict_step({"x": torch.ones(1, 2), "y": torch.zeros(1, 2)}),
    )
    for client in POINTS:
        w = side_by_side(played.server.weights)
        shifted = w.sum(1) + played.pool.get(client)["task"]["offset.bias"].numpy()
        score = played.history[-1].metrics[client].image_score.detach()
        nearly(score, [np.square(shifted).sum()])


class Mean(nn.Module):
    """An encoder: the mean of each colour."""

    width = 3

    def forward(self, images):
        return images.mean((2, 3))


@pytest.mark.parametrize("kind", ["classifier", "autoencoder", "memory bank"])
def test_every_task_lets_the_bias_in(make_task, kind):
    if kind == "classifier":
        task = Classifier(Mean(), classes=2, augment=False)
    elif kind == "autoencoder":

        def decoder(width, size):
            return nn.Sequential(nn.Linear(width, 3 * size * size), nn.Unflatten(1, (3, size, size)))

        task = Autoencoder(Mean(), decoder, image_size=32, mean=[0.0] * 3, std=[1.0] * 3)
    else:
        task = make_task()
    batch = {"image": torch.randn(2, 3, 32, 32), "label": torch.tensor([0, 1])}
    client = DBEClient(task)
    with torch.no_grad():
        before = task.features(batch)
        client.offset.bias += 1
        torch.testing.assert_close(task.features(batch), before + 1)


def test_evaluation_leaves_no_trace(play):
    often, seldom = play(evaluate_every=1), play(evaluate_every=3)
    exactly(often.server.state_dict(), seldom.server.state_dict())
    for client in (0, 1):
        exactly(often.pool.get(client), seldom.pool.get(client))


def test_a_killed_run_goes_on_as_if_nothing_happened(play):
    def kill(report):
        if report.round == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        play(folder="killed", on_round=kill)
    continued, whole = play(folder="killed"), play()
    exactly(continued.server.state_dict(), whole.server.state_dict())
    exactly(continued.history[-1].metrics, whole.history[-1].metrics)
    for client in (0, 1):
        exactly(continued.pool.get(client), whole.pool.get(client))


def test_the_bank_that_scores_was_made_with_the_clients_bias(federate, make_task, make_loader):
    # A bank that holds every patch: what it must be is simply the features.
    data = {c: make_loader(3, c) for c in range(2)}
    parts = {"reduce": SampleReduce(), "slots": 3 * 16, "learning_rate": 0.05}
    played = federate(DBEClient, DBEServer, task=make_task(**parts), data=data)
    for client, loader in data.items():
        predicts = played.history[-1].metrics[client]
        assert predicts["offset.bias"].all()
        task = make_task(**parts)
        DBEClient(task)
        task.load_state_dict(predicts)
        with torch.no_grad():
            bank = torch.cat([task.features(batch).flatten(0, 1) for batch in loader])
        exactly(predicts["memory"], bank)
