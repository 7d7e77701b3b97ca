"""FedPHP: the paper's numbers, its limits, and a personal model that stays personal."""

from functools import partial

import numpy as np
import pytest
import torch
from safetensors.torch import save
from torch.utils.data import DataLoader

from lit_fedad.contracts import Update
from lit_fedad.federation.aggregation import weighted_mean
from lit_fedad.memory.reduce import SampleReduce
from lit_fedad.methods.fedavg import FedAvgClient
from lit_fedad.methods.fedphp import FedPHPClient, rbf_mmd

POINTS = {
    0: [([1.0, 0.5], [0.0, 1.0]), ([-0.5, 2.0], [1.0, 0.0]), ([0.25, -1.0], [0.5, 0.5])],
    1: [([2.0, 1.0], [-1.0, 0.5])],
}
INITIAL = np.array([[0.5, -1.0, 0.125], [0.25, 2.0, -0.5]])  # weight and bias of the task, side by side
STEP, BATCH, ROUNDS = 0.1, 2, 3

exactly = partial(torch.testing.assert_close, rtol=0, atol=0)


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


def mmd_by_loop(one, other):
    def kernel(a, b):
        return sum(np.exp(-((a - b) ** 2).sum() / (2 * width)) for width in (10, 15, 20, 50))

    def mean(rows, columns):
        return sum(kernel(a, b) for a in rows for b in columns) / (len(rows) * len(columns))

    return mean(one, one) + mean(other, other) - 2 * mean(one, other)


def mmd_slope(one, other):
    """Derivative of the discrepancy by each row of `one`."""

    def slope(a, b):
        return sum(
            -(a - b) / width * np.exp(-((a - b) ** 2).sum() / (2 * width)) for width in (10, 15, 20, 50)
        )

    n, m = len(one), len(other)
    return np.array(
        [
            2 / n**2 * sum(slope(row, each) for each in one)
            - 2 / (n * m) * sum(slope(row, each) for each in other)
            for row in one
        ]
    )


def by_hand(points, mu, weight):
    """Server's and personal weights after three rounds."""
    shared, personal = INITIAL, dict.fromkeys(points, INITIAL)
    for round in range(1, ROUNDS + 1):
        trained = {}
        for client, rows in points.items():
            w = shared
            for x, y in batches(rows):
                features = x @ w.T
                slope = (1 - weight) * (features - y) / len(x)
                slope = slope + weight * mmd_slope(features, x @ personal[client].T)
                w = w - STEP * slope.T @ x
            kept = mu * round / ROUNDS
            personal[client] = kept * personal[client] + (1 - kept) * w
            trained[client] = w
        total = sum(map(len, points.values()))
        shared = sum(len(points[client]) / total * w for client, w in trained.items())
    return shared, personal


@pytest.fixture(params=["classifier", "memory bank"])
def play(request, federate, make_classifier, make_points, make_task, make_loader):
    """Plays three rounds of two clients, on either task."""

    def play(**settings):
        if request.param == "classifier":
            task, data = make_classifier(), {c: make_points(4, c, dtype=torch.float32) for c in range(2)}
        else:
            task, data = make_task(learning_rate=0.01), {c: make_loader(3, c) for c in range(2)}
        return federate(
            FedPHPClient, task=task, data=data, shuffle=True, client={"rounds": ROUNDS}, **settings
        )

    return play


def test_discrepancy_is_the_double_loop():
    draw = torch.Generator().manual_seed(0)
    one, other = torch.randn(2, 5, 3, generator=draw, dtype=torch.float64) * 4
    assert float(rbf_mmd(one, other[:4])) == pytest.approx(
        mmd_by_loop(one.numpy(), other[:4].numpy()), rel=1e-12
    )


def test_discrepancy_of_equal_sets_is_nothing_and_of_far_ones_is_eight():
    rows = torch.randn(4, 3, dtype=torch.float64)
    assert float(rbf_mmd(rows, rows)) == pytest.approx(0, abs=1e-12)
    # Four kernels, each 1 within a set of one point and 0 between sets: 4 + 4 - 0.
    assert float(rbf_mmd(rows[:1], rows[:1] + 1000)) == pytest.approx(8)


@pytest.mark.parametrize("points", [POINTS, {0: POINTS[0]}, {0: POINTS[0], 1: POINTS[0]}])
def test_three_rounds_are_the_papers(federate, make_linear, points):
    played = federate(
        FedPHPClient,
        task=make_linear(),
        data=loaders(points),
        client={"rounds": ROUNDS, "mu": 0.9, "weight": 0.4},
    )
    shared, personal = by_hand(points, mu=0.9, weight=0.4)
    # Double precision: hand and machine differ in the order of sums only.
    np.testing.assert_allclose(side_by_side(played.server.weights), shared, rtol=1e-12)
    for client in points:
        kept = played.pool.get(client)["inherited"]
        np.testing.assert_allclose(side_by_side(kept), personal[client], rtol=1e-12)


def test_one_step_in_numbers(federate, make_linear):
    """One client, one point x = (1, 2), y = 0: features (-1.375, 3.75), and mu_1 = 0.5 * 1/1."""
    data = loaders({0: [([1.0, 2.0], [0.0, 0.0])]})
    played = federate(
        FedPHPClient, task=make_linear(), data=data, rounds=1, client={"rounds": 1, "mu": 0.5, "weight": 0.0}
    )
    trained = [[0.6375, -0.725, 0.2625], [-0.125, 1.25, -0.875]]
    inherited = [[0.56875, -0.8625, 0.19375], [0.0625, 1.625, -0.6875]]
    np.testing.assert_allclose(side_by_side(played.server.weights), trained, rtol=1e-14)
    np.testing.assert_allclose(side_by_side(played.pool.get(0)["inherited"]), inherited, rtol=1e-14)


def test_without_the_discrepancy_the_server_is_fedavgs(federate, make_classifier, make_points):
    data = {c: make_points(4 + 2 * c, seed=c, dtype=torch.float32) for c in range(2)}
    ours = federate(
        FedPHPClient, task=make_classifier(), data=data, shuffle=True, client={"rounds": 3, "weight": 0.0}
    )
    theirs = federate(FedAvgClient, task=make_classifier(), data=data, shuffle=True)
    exactly(ours.server.weights, theirs.server.weights)


def test_the_discrepancy_changes_training(federate, make_linear):
    played = [
        federate(
            FedPHPClient, task=make_linear(), data=loaders(POINTS), client={"rounds": 3, "weight": weight}
        )
        for weight in (0.0, 0.4)
    ]
    assert not torch.equal(*(one.server.weights["layer.weight"] for one in played))


def test_without_memory_the_personal_model_is_what_the_client_sent(federate, make_classifier, make_points):
    sizes = {0: 4, 1: 6}
    data = {c: make_points(n, seed=c, dtype=torch.float32) for c, n in sizes.items()}
    played = federate(FedPHPClient, task=make_classifier(), data=data, client={"rounds": 3, "mu": 0.0})
    sent = {c: Update(played.pool.get(c)["inherited"], n) for c, n in sizes.items()}
    assert not torch.equal(sent[0].message["classifier.weight"], sent[1].message["classifier.weight"])
    exactly(weighted_mean(sent), played.server.weights)


def test_identical_clients_are_one_client(federate, make_linear):
    many, one = (
        federate(
            FedPHPClient,
            task=make_linear(),
            data=loaders(dict.fromkeys(range(n), POINTS[0])),
            client={"rounds": 3},
        )
        for n in (2, 1)
    )
    exactly(many.server.weights, one.server.weights)
    exactly(many.pool.get(1), one.pool.get(0))


def test_order_of_clients_does_not_matter(federate, make_linear, make_points):
    data = {c: make_points(2 + c, seed=c) for c in range(3)}
    places = {0: 2, 1: 0, 2: 1}
    given, moved = (
        federate(FedPHPClient, task=make_linear(), data=each, client={"rounds": 3})
        for each in (data, {new: data[old] for old, new in places.items()})
    )
    # The server adds in another order.
    torch.testing.assert_close(moved.server.weights, given.server.weights, rtol=1e-12, atol=1e-14)
    for old, new in places.items():
        torch.testing.assert_close(
            moved.pool.get(new)["inherited"], given.pool.get(old)["inherited"], rtol=1e-12, atol=1e-14
        )


def test_bytes_are_fedavgs_and_the_personal_model_never_crosses(federate, make_linear):
    played = federate(FedPHPClient, task=make_linear(), data=loaders(POINTS), client={"rounds": 3})
    size = len(save({"layer.weight": torch.zeros(2, 2).double(), "layer.bias": torch.zeros(2).double()}))
    for report in played.history[-3:]:
        assert report.bytes_up == report.bytes_down == {0: size, 1: size}
        assert report.elements_up == {0: 6, 1: 6}


def test_an_absent_client_keeps_its_own(federate, make_linear):
    short, long = (
        federate(
            FedPHPClient,
            task=make_linear(),
            data=loaders(POINTS),
            rounds=rounds,
            fraction=0.5,
            client={"rounds": 2},
        )
        for rounds in (1, 2)
    )
    (present,), (later,) = (report.participants for report in long.history[-2:])
    assert present != later
    assert not torch.equal(short.pool.get(present)["inherited"]["layer.bias"], torch.tensor(INITIAL[:, 2]))
    exactly(long.pool.get(present), short.pool.get(present))
    exactly(side_by_side(short.pool.get(later)["inherited"]), INITIAL)


def test_predicts_with_the_inherited_model(federate, make_classifier, make_points):
    data = {c: make_points(4 + 2 * c, seed=c, dtype=torch.float32) for c in range(2)}
    played = federate(FedPHPClient, task=make_classifier(), data=data, client={"rounds": 3})
    for client in data:
        inherited = played.pool.get(client)["inherited"]
        predicts = played.history[-1].metrics[client]
        exactly({name: predicts[name] for name in inherited}, inherited)
        assert not torch.equal(predicts["classifier.weight"], played.server.weights["classifier.weight"])


def test_evaluation_leaves_no_trace(play):
    often, seldom = play(evaluate_every=1), play(evaluate_every=3)
    exactly(often.server.weights, seldom.server.weights)
    for client in (0, 1):
        exactly(often.pool.get(client), seldom.pool.get(client))


def test_the_bank_that_scores_was_made_with_the_inherited_model(federate, make_task, make_loader):
    # A bank that holds every patch: what it must be is simply the features.
    data = {c: make_loader(3, seed=c) for c in range(2)}
    parts = {"reduce": SampleReduce(), "slots": 3 * 16, "learning_rate": 0.05}
    played = federate(FedPHPClient, task=make_task(**parts), data=data, client={"rounds": 3})
    for client, loader in data.items():
        predicts = played.history[-1].metrics[client]
        task = make_task(**parts)
        task.load_state_dict(predicts)
        exactly({n: predicts[n] for n in played.server.weights}, played.pool.get(client)["inherited"])
        with torch.no_grad():
            bank = torch.cat([task.features(batch).flatten(0, 1) for batch in loader])
            task.load_state_dict(played.server.weights, strict=False)
            other = torch.cat([task.features(batch).flatten(0, 1) for batch in loader])
        exactly(predicts["memory"], bank)
        assert not torch.equal(bank, other)


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
