"""APPLE: the paper's numbers, its limits, all cores down and one up."""

import math
from functools import partial

import numpy as np
import pytest
import torch
from safetensors.torch import save
from torch.utils.data import DataLoader

from lit_fedad.memory.reduce import SampleReduce
from lit_fedad.methods.apple import CLIENTS, SHARES, AppleClient, AppleServer
from lit_fedad.methods.local import LocalClient

POINTS = {
    0: [([1.0, 0.5], [0.0, 1.0]), ([-0.5, 2.0], [1.0, 0.0]), ([0.25, -1.0], [0.5, 0.5])],
    1: [([2.0, 1.0], [-1.0, 0.5])],
}
INITIAL = np.array([[0.5, -1.0, 0.125], [0.25, 2.0, -0.5]])  # weight and bias of the task, side by side
STEP, BATCH, ROUNDS = 0.1, 2, 3

exactly = partial(torch.testing.assert_close, rtol=0, atol=0)
nearly = partial(np.testing.assert_allclose, rtol=2e-5, atol=1e-6)  # single precision against double


def loaders(points):
    return {
        client: DataLoader([{"x": torch.tensor(x), "y": torch.tensor(y)} for x, y in rows], BATCH)
        for client, rows in points.items()
    }


def batches(rows):
    """Inputs with a column of ones, and targets."""
    for start in range(0, len(rows), BATCH):
        x, y = (np.array(column) for column in zip(*rows[start : start + BATCH], strict=True))
        yield np.column_stack([x, np.ones(len(x))]), y


def side_by_side(state):
    """Weights and biases of one model, or of several [N, 2, 3]."""
    return np.concatenate([state["layer.weight"].numpy(), state["layer.bias"].numpy()[..., None]], axis=-1)


def by_hand(points, rate, mu, early):
    """Cores [N, 2, 3] and relations [N, N] after three rounds; `early` in rounds."""
    count = len(points)
    shares = np.array([len(rows) for rows in points.values()]) / sum(map(len, points.values()))
    cores = np.stack([INITIAL] * count)
    relations = np.full((count, count), 1 / count)
    for t in range(1, ROUNDS + 1):
        hold = (1 + math.cos(math.pi * t / early)) / 2 if t < early else 0.0
        received = cores.copy()
        for n, rows in enumerate(points.values()):
            mine, p = received.copy(), relations[n]
            for x, y in batches(rows):
                mixture = sum(p[m] * mine[m] for m in range(count))
                slope = (x @ mixture.T - y).T @ x / len(x)
                by_core = np.array([(slope * core).sum() for core in mine])
                mine[n] = mine[n] - STEP * p[n] * slope
                p = p - rate * (by_core + hold * mu * (p - shares))
            cores[n], relations[n] = mine[n], p
    return cores, relations


@pytest.fixture
def apple(federate, make_linear):
    """Plays APPLE on the linear task, in single precision."""

    def play(points, rounds=ROUNDS, client=None, **settings):
        task, client = make_linear(dtype=torch.float32), {"rounds": ROUNDS, **(client or {})}
        return federate(
            AppleClient,
            AppleServer,
            task=task,
            data=loaders(points),
            rounds=rounds,
            client=client,
            **settings,
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
        client = {"rounds": ROUNDS, "relation_learning_rate": 0.01}
        return federate(
            AppleClient, AppleServer, task=task, data=data, shuffle=True, client=client, **settings
        )

    return play


@pytest.mark.parametrize("points", [POINTS, {0: POINTS[0]}, {0: POINTS[0], 1: POINTS[0]}])
@pytest.mark.parametrize(("rate", "mu", "early"), [(0.05, 0.5, 1.0), (0.05, 2.0, 0.5), (0.0, 0.5, 1.0)])
def test_three_rounds_are_the_papers(apple, points, rate, mu, early):
    played = apple(points, client={"relation_learning_rate": rate, "mu": mu, "early": early})
    cores, relations = by_hand(points, rate, mu, early * ROUNDS)
    nearly(side_by_side(played.server.known), cores)
    for row, client in enumerate(points):
        nearly(played.pool.get(client)["relations"], relations[row])


def test_one_step_in_numbers(apple):
    """Two clients, p = (1/2, 1/2), equal cores: the mixture's features at (1, 2) are (-1.375, 3.75), y = 0.

    The own core moves by half a gradient; <grad, c> = |features|^2 = 15.953125 for both cores; early on, with
    lambda_1 = (1 + cos(pi/2)) / 2 = 1/2 and mu = 2, relations are also drawn to the shares (3/4, 1/4).
    """
    point = ([1.0, 2.0], [0.0, 0.0])
    client = {"rounds": 2, "relation_learning_rate": 0.01, "mu": 2.0, "early": 1.0}
    played = apple({0: [point, point, point], 1: [point]}, rounds=1, client=client)
    exactly(played.server.known[SHARES], torch.tensor([0.75, 0.25]))
    core = [[0.56875, -0.8625, 0.19375], [0.0625, 1.625, -0.6875]]
    nearly(side_by_side(played.server.known)[1], core)
    moved = [0.5 - 0.01 * (15.953125 + 1.0 * (0.5 - share)) for share in (0.75, 0.25)]
    nearly(moved, [0.34296875, 0.33796875])
    nearly(played.pool.get(1)["relations"], moved)


def test_lambda_falls_as_a_cosine_and_ends(apple):
    """With features at the targets nothing but the proximal term moves relations: half of the way to the shares."""
    # y = W x + b: no gradient until relations move; one step a client a round.
    x = [1.0, 2.0]
    y = (INITIAL @ [*x, 1.0]).tolist()
    client = {"relation_learning_rate": 0.1, "mu": 1.0, "early": 1.0}
    played = apple({0: [(x, y)] * 2, 1: [(x, y)]}, rounds=1, client=client)
    hold = (1 + math.cos(math.pi / 3)) / 2
    assert hold == pytest.approx(0.75)
    nearly(played.pool.get(1)["relations"], 0.5 - 0.1 * 0.75 * (0.5 - np.array([2 / 3, 1 / 3])))
    late = apple({0: [(x, y)] * 2, 1: [(x, y)]}, client={**client, "early": 1 / 3})
    nearly(late.pool.get(1)["relations"], [0.5, 0.5])


def test_one_client_with_fixed_relations_is_on_its_own(federate, make_classifier, make_points):
    data = {0: make_points(6, dtype=torch.float32)}
    client = {"rounds": 3, "relation_learning_rate": 0.0}
    ours = federate(AppleClient, AppleServer, task=make_classifier(), data=data, shuffle=True, client=client)
    theirs = federate(
        LocalClient, task=make_classifier(), data=data, shuffle=True, client={"keep_optimizer": False}
    )
    exactly(ours.pool.get(0)["relations"].detach(), torch.ones(1))
    exactly(ours.history[-1].metrics, theirs.history[-1].metrics)


def test_identical_clients_keep_identical_cores(apple):
    played = apple(dict.fromkeys(range(3), POINTS[0]), client={"relation_learning_rate": 0.05})
    cores = side_by_side(played.server.known)
    # Each client sums the same numbers in the same order: its own core is a row like the others.
    assert (cores == cores[0]).all()
    assert not np.allclose(cores[0], INITIAL)
    for client in range(3):
        relations = played.pool.get(client)["relations"]
        # Gradients by live and by constant cores are the same sums.
        torch.testing.assert_close(relations, relations[:1].expand(3))


def test_order_of_clients_does_not_matter(apple):
    points = {0: POINTS[0], 1: POINTS[1], 2: POINTS[0][:2]}
    places = {0: 2, 1: 0, 2: 1}
    client = {"relation_learning_rate": 0.05}
    given = apple(points, client=client)
    moved = apple({new: points[old] for old, new in places.items()}, client=client)
    order = list(places.values())
    # Mixtures are sums over cores in another order.
    nearly(side_by_side(moved.server.known)[order], side_by_side(given.server.known))
    for old, new in places.items():
        nearly(moved.pool.get(new)["relations"][order], given.pool.get(old)["relations"])


def test_clients_need_not_be_numbered_from_0(apple):
    client = {"relation_learning_rate": 0.05}
    given, named = apple(POINTS, client=client), apple({3: POINTS[0], 7: POINTS[1]}, client=client)
    exactly(named.server.known[CLIENTS], torch.tensor([3, 7]))
    exactly(side_by_side(named.server.known), side_by_side(given.server.known))
    exactly(named.pool.get(7), given.pool.get(1))


def test_all_cores_come_down_one_goes_up_and_relations_never(apple):
    played = apple(POINTS)
    core = {"layer.weight": torch.zeros(2, 2), "layer.bias": torch.zeros(2)}
    all_cores = {"layer.weight": torch.zeros(2, 2, 2), "layer.bias": torch.zeros(2, 2)}
    who = {CLIENTS: torch.zeros(2, dtype=torch.int64), SHARES: torch.zeros(2)}
    for report in played.history[-3:]:
        assert report.bytes_up == dict.fromkeys(POINTS, len(save(core)))
        assert report.elements_up == dict.fromkeys(POINTS, 6)
        assert report.bytes_down == dict.fromkeys(POINTS, len(save({**all_cores, **who})))


def test_cores_cross_in_the_precision_of_the_task(federate, make_linear):
    data = {
        0: DataLoader([{"x": torch.ones(2, dtype=torch.float64), "y": torch.ones(2, dtype=torch.float64)}])
    }
    played = federate(AppleClient, AppleServer, task=make_linear(), data=data, client={"rounds": 3})
    assert played.server.known["layer.weight"].dtype == torch.float64


def test_an_absent_client_keeps_core_and_relations(apple):
    short, long = (
        apple(POINTS, rounds=rounds, fraction=0.5, client={"relation_learning_rate": 0.05})
        for rounds in (1, 2)
    )
    (present,), (later,) = (report.participants for report in long.history[-2:])
    assert present != later
    assert not np.array_equal(side_by_side(short.server.known)[present], INITIAL)
    exactly(side_by_side(long.server.known)[present], side_by_side(short.server.known)[present])
    exactly(long.pool.get(present), short.pool.get(present))
    exactly(side_by_side(short.server.known)[later], INITIAL.astype(np.float32))
    exactly(short.pool.get(later)["relations"].detach(), torch.tensor([0.5, 0.5]))


def test_predicts_with_the_mixture(apple):
    played = apple(POINTS, client={"relation_learning_rate": 0.05})
    cores = side_by_side(played.server.known)
    for client in POINTS:
        relations = played.pool.get(client)["relations"].numpy()
        predicts = side_by_side(played.history[-1].metrics[client])
        nearly(predicts, np.tensordot(relations, cores, axes=1))
        assert not np.allclose(predicts, cores[client])


def test_running_statistics_stay_with_the_client(federate, make_classifier, make_points):
    data = {c: make_points(4, c, dtype=torch.float32) for c in range(2)}
    played = federate(AppleClient, AppleServer, task=make_classifier(), data=data, client={"rounds": 3})
    assert not any("running" in name for name in played.server.known)
    one, other = (played.pool.get(client)["task"]["downsample.1.running_mean"] for client in data)
    assert not torch.equal(one, other)
    exactly(played.history[-1].metrics[1]["downsample.1.running_mean"], other)


def test_evaluation_leaves_no_trace(play):
    often, seldom = play(evaluate_every=1), play(evaluate_every=3)
    exactly(often.server.known, seldom.server.known)
    for client in (0, 1):
        exactly(often.pool.get(client), seldom.pool.get(client))


def test_a_killed_run_goes_on_as_if_nothing_happened(play):
    def kill(report):
        if report.round == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        play(folder="killed", on_round=kill)
    continued, whole = play(folder="killed"), play()
    exactly(continued.server.known, whole.server.known)
    exactly(continued.history[-1].metrics, whole.history[-1].metrics)
    for client in (0, 1):
        exactly(continued.pool.get(client), whole.pool.get(client))


def test_the_bank_that_scores_was_made_with_the_mixture(federate, make_task, make_loader):
    # A bank that holds every patch: what it must be is simply the features.
    data = {c: make_loader(3, c) for c in range(2)}
    parts = {"reduce": SampleReduce(), "slots": 3 * 16, "learning_rate": 0.05}
    client = {"rounds": 3, "relation_learning_rate": 0.01}
    played = federate(AppleClient, AppleServer, task=make_task(**parts), data=data, client=client)
    for row, loader in data.items():
        predicts = played.history[-1].metrics[row]
        task = make_task(**parts)
        task.load_state_dict(predicts)
        own = {name: cores[row] for name, cores in played.server.known.items() if name.startswith("head.")}
        with torch.no_grad():
            bank = torch.cat([task.features(batch).flatten(0, 1) for batch in loader])
            task.load_state_dict(own, strict=False)
            other = torch.cat([task.features(batch).flatten(0, 1) for batch in loader])
        exactly(predicts["memory"], bank)
        assert not torch.equal(bank, other)
