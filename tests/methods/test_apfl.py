"""APFL: the paper's numbers, its limits, and a mixture that stays personal."""

from functools import partial

import numpy as np
import pytest
import torch
from safetensors.torch import save
from torch.utils.data import DataLoader

from lit_fedad.memory.reduce import SampleReduce
from lit_fedad.methods.apfl import APFLClient
from lit_fedad.methods.fedavg import FedAvgClient
from lit_fedad.methods.local import LocalClient

POINTS = {
    0: [([1.0, 0.5], [0.0, 1.0]), ([-0.5, 2.0], [1.0, 0.0]), ([0.25, -1.0], [0.5, 0.5])],
    1: [([2.0, 1.0], [-1.0, 0.5])],
}
INITIAL = np.array([[0.5, -1.0, 0.125], [0.25, 2.0, -0.5]])  # weight and bias of the task, side by side
STEP, BATCH, ROUNDS = 0.1, 2, 3

exactly = partial(torch.testing.assert_close, rtol=0, atol=0)
# Weights are in double precision here, the mixture weight alpha in single.
nearly = partial(np.testing.assert_allclose, rtol=1e-6)


def loaders(points):
    return {
        client: DataLoader(
            [{"x": torch.tensor(x).double(), "y": torch.tensor(y).double()} for x, y in rows], BATCH
        )
        for client, rows in points.items()
    }


def batches(rows):
    """Inputs with a column of ones, and targets."""
    for start in range(0, len(rows), BATCH):
        x, y = (np.array(column) for column in zip(*rows[start : start + BATCH], strict=True))
        yield np.column_stack([x, np.ones(len(x))]), y


def side_by_side(state):
    return np.column_stack([state["layer.weight"].numpy(), state["layer.bias"].numpy()])


def gradient(w, x, y):
    return (x @ w.T - y).T @ x / len(x)


def by_hand(points, alpha, adaptive):
    """Shared weights, and each client's v and alpha, after three rounds."""
    shared, v, alphas = INITIAL, dict.fromkeys(points, INITIAL), dict.fromkeys(points, alpha)
    for _ in range(ROUNDS):
        trained = {}
        for client, rows in points.items():
            w = shared
            for x, y in batches(rows):
                a = alphas[client]
                slope = gradient(a * v[client] + (1 - a) * w, x, y)
                if adaptive:
                    alphas[client] = np.clip(a - STEP * ((v[client] - w) * slope).sum(), 0, 1)
                v[client] = v[client] - STEP * a * slope
                w = w - STEP * gradient(w, x, y)
            trained[client] = w
        total = sum(map(len, points.values()))
        shared = sum(len(points[client]) / total * w for client, w in trained.items())
    return shared, v, alphas


@pytest.fixture
def apfl(federate, make_linear):
    """Plays APFL on the linear task."""

    def play(points, rounds=ROUNDS, client=None, **settings):
        return federate(
            APFLClient, task=make_linear(), data=loaders(points), rounds=rounds, client=client, **settings
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
        return federate(APFLClient, task=task, data=data, shuffle=True, **settings)

    return play


@pytest.mark.parametrize("points", [POINTS, {0: POINTS[0]}, {0: POINTS[0], 1: POINTS[0]}])
@pytest.mark.parametrize(("alpha", "adaptive"), [(0.5, True), (0.9, True), (0.25, False)])
def test_three_rounds_are_the_papers(apfl, points, alpha, adaptive):
    played = apfl(points, client={"alpha": alpha, "adaptive": adaptive})
    shared, v, alphas = by_hand(points, alpha, adaptive)
    nearly(side_by_side(played.server.weights), shared, rtol=1e-12)
    for client in points:
        own = played.pool.get(client)
        nearly(side_by_side(own["personal"]), v[client])
        nearly(own["alpha"], alphas[client])


def test_one_step_in_numbers(apfl):
    """One point x = (1, 2), y = 0, features (-1.375, 3.75): w follows its gradient, v half of it.

    Both start alike, so that alpha, whose gradient is along v - w, stays where it is."""
    played = apfl({0: [([1.0, 2.0], [0.0, 0.0])]}, rounds=1)
    nearly(side_by_side(played.server.weights), [[0.6375, -0.725, 0.2625], [-0.125, 1.25, -0.875]])
    own = played.pool.get(0)
    nearly(side_by_side(own["personal"]), [[0.56875, -0.8625, 0.19375], [0.0625, 1.625, -0.6875]])
    assert own["alpha"] == 0.5


def test_the_second_step_moves_alpha(apfl):
    """After the step above v - w = -0.5 (w - w0), and the features at the mixture are 0.55 of the first ones.

    A step of size 0.1 shrinks features by 1 - 0.1 (1 + 4 + 1) = 0.4, half a step by 0.7: the mixture's are at 0.55.
    v - w is 0.05 times the first gradient f x^T, hence <v - w, 0.55 f x^T> = 0.0275 |f|^2 |x|^2.
    """
    played = apfl({0: [([1.0, 2.0], [0.0, 0.0])] * 3}, rounds=1)
    squared = 1.375**2 + 3.75**2
    assert float(played.pool.get(0)["alpha"]) == pytest.approx(0.5 - 0.1 * 0.0275 * squared * 6, rel=1e-6)


@pytest.mark.parametrize(("alpha", "scale", "end"), [(0.05, 1.0, 0.0), (0.95, -1.0, 1.0)])
def test_alpha_is_clipped(make_linear, alpha, scale, end):
    client = APFLClient(make_linear(), alpha=alpha)
    client.alpha.grad = torch.tensor(10 * scale)
    client.on_before_optimizer_step(torch.optim.SGD(client.task.parameters(), lr=0.1))
    assert client.alpha == end
    assert client.alpha.requires_grad


def test_alpha_that_is_not_learnt_stays(apfl):
    played = apfl(POINTS, client={"alpha": 0.3, "adaptive": False})
    for client in POINTS:
        exactly(played.pool.get(client)["alpha"], torch.tensor(0.3))


@pytest.mark.parametrize("settings", [{"alpha": 0.0, "adaptive": False}, {"alpha": 0.5}, {"alpha": 1.0}])
def test_shared_weights_follow_fedavg_whatever_the_mixture(federate, make_classifier, make_points, settings):
    data = {c: make_points(4 + 2 * c, c, dtype=torch.float32) for c in range(2)}
    ours = federate(APFLClient, task=make_classifier(), data=data, shuffle=True, client=settings)
    theirs = federate(FedAvgClient, task=make_classifier(), data=data, shuffle=True)
    exactly(ours.server.weights, theirs.server.weights)


def test_at_alpha_0_the_shared_model_predicts(apfl, federate, make_linear):
    ours = apfl(POINTS, client={"alpha": 0.0, "adaptive": False})
    theirs = federate(FedAvgClient, task=make_linear(), data=loaders(POINTS))
    exactly(ours.history[-1].metrics, theirs.history[-1].metrics)


def test_at_alpha_0_the_shared_weights_predict_beside_local_statistics(
    federate, make_classifier, make_points
):
    data = {c: make_points(4 + 2 * c, c, dtype=torch.float32) for c in range(2)}
    played = federate(APFLClient, task=make_classifier(), data=data, client={"alpha": 0.0, "adaptive": False})
    for client in data:
        predicts = played.history[-1].metrics[client]
        for name, entry in played.server.weights.items():
            local = name in ("downsample.1.running_mean", "downsample.1.running_var")
            assert torch.equal(predicts[name], entry) != local


def test_at_alpha_1_every_client_is_on_its_own(federate, make_classifier, make_points):
    data = {c: make_points(4 + 2 * c, c, dtype=torch.float32) for c in range(2)}
    settings = {"alpha": 1.0, "adaptive": False}
    ours = federate(APFLClient, task=make_classifier(), data=data, shuffle=True, client=settings)
    theirs = federate(
        LocalClient, task=make_classifier(), data=data, shuffle=True, client={"keep_optimizer": False}
    )
    exactly(ours.history[-1].metrics, theirs.history[-1].metrics)
    for client in data:
        exactly(ours.pool.get(client)["personal"], theirs.pool.get(client)["task"])


def test_identical_clients_are_one_client(apfl):
    many, one = (apfl(dict.fromkeys(range(n), POINTS[0])) for n in (2, 1))
    exactly(many.server.weights, one.server.weights)
    exactly(many.pool.get(1), one.pool.get(0))


def test_order_of_clients_does_not_matter(apfl):
    points = {0: POINTS[0], 1: POINTS[1], 2: POINTS[0][:2]}
    places = {0: 2, 1: 0, 2: 1}
    given, moved = apfl(points), apfl({new: points[old] for old, new in places.items()})
    # The server adds in another order.
    torch.testing.assert_close(moved.server.weights, given.server.weights, rtol=1e-12, atol=1e-14)
    for old, new in places.items():
        torch.testing.assert_close(moved.pool.get(new), given.pool.get(old), rtol=1e-6, atol=1e-7)


def test_bytes_are_fedavgs_and_neither_v_nor_alpha_crosses(apfl):
    size = len(save({"layer.weight": torch.zeros(2, 2).double(), "layer.bias": torch.zeros(2).double()}))
    for report in apfl(POINTS).history[-3:]:
        assert report.bytes_up == report.bytes_down == dict.fromkeys(POINTS, size)
        assert report.elements_up == dict.fromkeys(POINTS, 6)


def test_an_absent_client_keeps_its_own(apfl):
    settings = {"client": {"alpha": 0.4}, "fraction": 0.5}
    short, long = (apfl(POINTS, rounds=rounds, **settings) for rounds in (1, 2))
    (present,), (later,) = (report.participants for report in long.history[-2:])
    assert present != later
    assert not np.array_equal(side_by_side(short.pool.get(present)["personal"]), INITIAL)
    exactly(long.pool.get(present), short.pool.get(present))
    exactly(side_by_side(short.pool.get(later)["personal"]), INITIAL)
    exactly(short.pool.get(later)["alpha"], torch.tensor(0.4))


def test_predicts_with_the_mixture(apfl):
    played = apfl(POINTS)
    for client in POINTS:
        own = played.pool.get(client)
        a, v = float(own["alpha"]), side_by_side(own["personal"])
        w = side_by_side(played.server.weights)
        # One minus alpha is rounded to single precision.
        nearly(side_by_side(played.history[-1].metrics[client]), a * v + (1 - a) * w)
        assert not np.allclose(v, w)


def test_the_frozen_backbone_exists_once(make_task, make_classifier):
    for task in (make_task(), make_classifier()):
        client = APFLClient(task)
        assert client.personal.backbone is task.backbone
        shared = {id(p) for p in task.parameters() if p.requires_grad}
        assert shared.isdisjoint(id(p) for p in client.personal.parameters())


def test_evaluation_leaves_no_trace(play):
    often, seldom = play(evaluate_every=1), play(evaluate_every=3)
    exactly(often.server.weights, seldom.server.weights)
    for client in (0, 1):
        exactly(often.pool.get(client), seldom.pool.get(client))


def test_a_killed_run_goes_on_as_if_nothing_happened(play):
    def kill(report):
        if report.round == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        play(folder="killed", on_round=kill)
    continued, whole = play(folder="killed"), play()
    exactly(continued.server.weights, whole.server.weights)
    exactly(continued.history[-1].metrics, whole.history[-1].metrics)
    for client in (0, 1):
        exactly(continued.pool.get(client), whole.pool.get(client))


def test_the_bank_that_scores_was_made_with_the_mixture(federate, make_task, make_loader):
    # A bank that holds every patch: what it must be is simply the features.
    data = {c: make_loader(3, c) for c in range(2)}
    parts = {"reduce": SampleReduce(), "slots": 3 * 16, "learning_rate": 0.05}
    played = federate(APFLClient, task=make_task(**parts), data=data)
    for client, loader in data.items():
        predicts = played.history[-1].metrics[client]
        own = played.pool.get(client)
        for name, v in own["personal"].items():
            if name.startswith("head."):
                mixture = own["alpha"] * v + (1 - own["alpha"]) * played.server.weights[name]
                exactly(predicts[name], mixture)
        task = make_task(**parts)
        task.load_state_dict(predicts)
        with torch.no_grad():
            bank = torch.cat([task.features(batch).flatten(0, 1) for batch in loader])
            task.load_state_dict(played.server.weights, strict=False)
            other = torch.cat([task.features(batch).flatten(0, 1) for batch in loader])
        exactly(predicts["memory"], bank)
        assert not torch.equal(bank, other)
