"""APPLE: the paper's numbers, its limits, all cores down and one up."""

import copy
from functools import partial

import numpy as np
import pytest
import torch
from helpers.frozen import frozen_encoder
from safetensors.torch import save

from lit_fedad.contracts import Context
from lit_fedad.federation.evaluator import Evaluator, LocalQuery
from lit_fedad.memory.reduce import SampleReduce
from lit_fedad.methods.apple import CLIENTS, SHARES, AppleClient, AppleServer, invertible_mixture
from lit_fedad.methods.parts.functional import trainable
from lit_fedad.tasks.classifier import Classifier

STEP, ROUNDS = 0.1, 3

# Cores are in double precision here, relations in single.
nearly = partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-7)


def cores_of(known):
    """All core models [N, 2, 3], weight and bias side by side."""
    return np.concatenate([known["layer.weight"].numpy(), known["layer.bias"].numpy()[..., None]], axis=-1)


def authors_lambda(schedule, r, count):
    """As in the authors' code, with rounds r counted from 0."""
    if r >= count:
        return 0.0
    return 0.001 ** (r / count) if schedule == "exponential" else (np.cos(np.pi / count * r) + 1) / 2


def by_hand(hand, data, rate, momentum, mu, early, schedule):
    """Cores [N, 2, 3] and relations [N, N] after three rounds, by the authors' rules; `early` in rounds."""
    sizes = np.array([len(loader.dataset) for loader in data.values()])
    shares = sizes / sizes.sum()
    cores, relations = np.stack([hand.start] * len(data)), np.stack([shares] * len(data))
    for r in range(ROUNDS):
        weight = authors_lambda(schedule, r, early) * mu
        received = cores.copy()
        for n, loader in enumerate(data.values()):
            mine, p, velocity = received.copy(), relations[n], 0.0
            for x, y in hand.batches(loader):
                slope = hand.gradient(np.tensordot(p, mine, axes=1), x, y)
                by_relation = (slope * mine).sum((1, 2)) + weight * 2 * (p - shares)
                mine[n] -= STEP * p[n] * slope
                velocity = momentum * velocity + by_relation
                p = p - rate * velocity
            cores[n], relations[n] = mine[n], p
    return cores, relations


@pytest.fixture
def apple(federate, make_linear):
    """Plays APPLE on the linear task, with relations that move visibly."""

    def play(data, client=None, **settings):
        client = {"rounds": ROUNDS, "relation_learning_rate": 0.02, **(client or {})}
        settings = {"server": {"independent_init": False}, **settings}
        return federate(AppleClient, AppleServer, task=make_linear(), data=data, client=client, **settings)

    return play


# ------------------------------------------------------------------------------------------ the paper's numbers


@pytest.mark.parametrize("clients", [(0, 1), (0,), (0, 0)])
@pytest.mark.parametrize(
    ("rate", "momentum", "mu", "early", "schedule"),
    [
        (0.02, 0.9, 0.5, 1.0, "exponential"),
        (0.02, 0.4, 2.0, 0.7, "cosine"),
        (0.0, 0.9, 0.5, 1.0, "exponential"),
    ],
)
def test_three_rounds_are_the_authors(
    apple, hand, points_by_hand, clients, rate, momentum, mu, early, schedule
):
    data = {number: points_by_hand[client] for number, client in enumerate(clients)}
    relations = {"relation_learning_rate": rate, "relation_momentum": momentum}
    settings = {**relations, "mu": mu, "early": early, "schedule": schedule}
    played = apple(data, client=settings)
    cores, relations = by_hand(hand, data, rate, momentum, mu, int(early * ROUNDS), schedule)
    nearly(cores_of(played.server.known), cores)
    for client in data:
        nearly(played.pool.get(client)["relations"], relations[client])


@pytest.mark.parametrize("schedule", ["exponential", "cosine"])
@pytest.mark.parametrize(("rounds", "early"), [(6, 0.2), (20, 0.2), (160, 0.1), (4, 0.2)])
def test_lambda_is_the_authors(make_linear, schedule, rounds, early):
    client = AppleClient(make_linear(), rounds=rounds, early=early, schedule=schedule)
    for number in range(1, rounds + 1):
        client.context = Context(0, number, 0)
        expected = authors_lambda(schedule, number - 1, int(rounds * early))
        assert client.anchoring() == pytest.approx(expected, rel=1e-12)


def test_cores_begin_independently_as_draws_of_the_same_distribution(make_classifier, exactly):
    client = AppleClient(make_classifier(), rounds=ROUNDS)
    servers = [AppleServer(client), AppleServer(client)]
    for server, sizes in zip(servers, [{2: 1, 5: 3}, {5: 3}], strict=True):
        server.register_clients(sizes)
    weights, drawn = servers[0].weights, servers[0].known
    for name, core in weights.items():
        exactly(drawn[name].flatten(1).sort(1).values[0], core.flatten().sort().values)
    assert not torch.equal(*drawn["downsample.0.weight"])
    assert torch.equal(*drawn["downsample.1.weight"])  # ones stay ones
    loaded = AppleServer(client, start="a run")
    loaded.register_clients({2: 1, 5: 3})
    assert torch.equal(*loaded.known["downsample.0.weight"])  # weights of a run are kept
    exactly(servers[1].known["downsample.0.weight"][0], drawn["downsample.0.weight"][1])


# ---------------------------------------------------------------------------------------------------- its limits


def test_order_of_clients_does_not_matter(apple, make_points):
    data = {c: make_points(2 + c, c) for c in range(3)}
    places = {0: 2, 1: 0, 2: 1}
    order = list(places.values())
    given, moved = apple(data), apple({new: data[old] for old, new in places.items()})
    # Mixtures are sums over cores in another order.
    nearly(cores_of(moved.server.known)[order], cores_of(given.server.known))
    for old, new in places.items():
        nearly(moved.pool.get(new)["relations"][order], given.pool.get(old)["relations"])


def test_clients_need_not_be_numbered_from_0(apple, points_by_hand, exactly):
    given, named = apple(points_by_hand), apple({3: points_by_hand[0], 7: points_by_hand[1]})
    exactly(named.server.known[CLIENTS], torch.tensor([3, 7]))
    exactly(cores_of(named.server.known), cores_of(given.server.known))
    exactly(named.pool.get(7), given.pool.get(1))


# -------------------------------------------------------------------------------------------- what is personal


def test_all_cores_come_down_one_goes_up_and_relations_never(apple, points_by_hand, tap):
    played = apple(points_by_hand, channel=tap)
    core = {"layer.weight": torch.zeros(2, 2).double(), "layer.bias": torch.zeros(2).double()}
    both = {name: torch.stack([entry, entry]) for name, entry in core.items()}
    who = {CLIENTS: torch.zeros(2, dtype=torch.int64), SHARES: torch.zeros(2)}
    for report in played.history[-3:]:
        assert report.bytes_up == dict.fromkeys((0, 1), len(save(core)))
        assert report.bytes_down == dict.fromkeys((0, 1), len(save({**both, **who})))
    assert tap.names == {*core, *who}


def test_an_absent_client_keeps_core_and_relations(apple, hand, points_by_hand, exactly):
    short, long = (apple(points_by_hand, rounds=rounds, fraction=0.5) for rounds in (1, 2))
    (present,), (later,) = (report.participants for report in long.history[-2:])
    assert present != later
    before, after = cores_of(short.server.known), cores_of(long.server.known)
    assert not np.array_equal(before[present], hand.start)
    exactly(after[present], before[present])
    exactly(long.pool.get(present), short.pool.get(present))
    exactly(before[later], hand.start)
    assert short.pool.get(later)["relations"].tolist() == pytest.approx([0.6, 0.4])


def test_predicts_with_the_mixture(apple, hand, points_by_hand):
    played = apple(points_by_hand)
    cores = cores_of(played.server.known)
    for client in points_by_hand:
        relations = played.pool.get(client)["relations"].numpy()
        predicts = hand.theta(played.history[-1].metrics[client])
        nearly(predicts, np.tensordot(relations, cores, axes=1))
        assert not np.allclose(predicts, cores[client])


def test_the_servers_model_of_a_client_is_its_core(apple, hand, points_by_hand):
    played = apple(points_by_hand)
    weights = LocalQuery("weights", lambda client, _: copy.deepcopy(client.task.state_dict()))
    for client, served in played.ask(ROUNDS, weights, which="server").items():
        nearly(hand.theta(served), cores_of(played.server.known)[client])


def test_right_after_training_the_mixture_holds_the_trained_core(apple, hand, points_by_hand):
    """The other cores are those of the round's start: the second client's turn does not know the first's."""

    class AfterFit(Evaluator):
        after_fit = True

        def score(self, client, number):
            return {name: entry.clone() for name, entry in client.task.state_dict().items()}

        def summarise(self, states):
            return {}

    starts = []

    def keep(federation, report):
        starts.append(cores_of(federation.server.known).copy())

    played = apple(points_by_hand, evaluator=AfterFit(), after_round=keep, rounds=2)
    for client, scored in played.history[-1].trained.items():
        cores = starts[0].copy()
        cores[client] = starts[1][client]
        assert not np.allclose(starts[0][client], starts[1][client])
        relations = played.pool.get(client)["relations"].numpy()
        nearly(hand.theta(scored), np.tensordot(relations, cores, axes=1))


def test_running_statistics_stay_with_the_client(federate, make_classifier, make_points, tap, exactly):
    data = {c: make_points(4, c) for c in range(2)}
    client = {"rounds": ROUNDS}
    played = federate(AppleClient, AppleServer, task=make_classifier(), data=data, client=client, channel=tap)
    assert not any("running" in name for name in tap.names)
    one, other = (played.pool.get(number)["own_entries"]["downsample.1.running_mean"] for number in data)
    assert not torch.equal(one, other)
    exactly(played.history[-1].metrics[0]["downsample.1.running_mean"], one)


def test_the_bank_it_trains_against_was_made_with_the_mixture(federate, make_task, make_loader, exactly):
    """A bank that holds every patch is the features."""
    parts = {"reduce": SampleReduce(), "slots": 3 * 16, "learning_rate": 0.05}
    settings = {"client": {"rounds": ROUNDS, "relation_learning_rate": 0.01}, "evaluate_every": ROUNDS}
    data, states = {c: make_loader(3, c) for c in range(2)}, {}

    def keep(federation, report):
        clients = [federation.pool.get(client) for client in (0, 1)]
        states[report.round] = copy.deepcopy((federation.server.known, clients))

    federate(AppleClient, AppleServer, task=make_task(**parts), data=data, after_round=keep, **settings)
    (known, before), (_, after) = states[1], states[2]
    for client in (0, 1):
        relations = before[client]["relations"]
        heads = {name: entry for name, entry in known.items() if name.startswith("head.")}
        task = make_task(**parts)
        mixture = {name: torch.tensordot(relations, entry, dims=1) for name, entry in heads.items()}
        task.load_state_dict(mixture, strict=False)
        with torch.no_grad():
            features = torch.cat([task(batch).flatten(0, 1) for batch in data[client]])
        exactly(after[client]["own_entries"]["memory"], features)


def test_mixed_precision_rounds_no_weight_of_the_mixture(make_linear):
    """A task without a product of matrices has the same loss, to the last digit."""

    class Scaled(make_linear):
        def forward(self, batch):
            return batch["x"] * self.layer.weight[0] + self.layer.bias

    client = AppleClient(Scaled(dtype=torch.float32), rounds=1, mu=0.0)
    client.context = Context(seed=0, round=1, client=1)
    drawn = torch.Generator().manual_seed(0)
    cores = {
        name: torch.randn(3, *entry.shape, generator=drawn) for name, entry in client.shared_state().items()
    }
    client.receive({**cores, CLIENTS: torch.arange(3), SHARES: torch.tensor([0.2, 0.3, 0.5])})
    client.configure_optimizers()
    batch, losses = {"x": torch.ones(1, 2), "y": torch.zeros(1, 2)}, []
    for mixed in (True, False):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=mixed):
            losses.append(client.training_step(batch)["loss"])
    assert torch.equal(*losses)


def test_an_attack_takes_gradients_at_the_mixture_that_the_server_can_compute():
    """Relations are at the shares: a core's gradient is the client's share, 0.6, of that at the mixture."""
    task = Classifier(frozen_encoder(hidden=2), 3, augment=False)
    batch = {"image": torch.rand(6, 3, 16, 16), "label": torch.tensor([0, 1, 2, 0, 1, 2])}
    client = AppleClient(task, rounds=1, mu=0.0)
    client.context = Context(seed=0, round=1, client=0)
    cores = {
        name: torch.stack([core, torch.randn(core.shape)]) for name, core in client.shared_state().items()
    }
    client.receive({**cores, CLIENTS: torch.tensor([0, 1]), SHARES: torch.tensor([0.6, 0.4])})
    client.configure_optimizers()
    sent = torch.autograd.grad(client.training_step(batch)["loss"], list(trainable(task).values()))
    invertible_mixture(client, client.broadcast_spec(), client.upload_spec()).settle()
    loss = task.objective(task(batch), batch)["loss"]
    for ours, theirs in zip(sent, torch.autograd.grad(loss, list(trainable(task).values())), strict=True):
        torch.testing.assert_close(ours, 0.6 * theirs)
