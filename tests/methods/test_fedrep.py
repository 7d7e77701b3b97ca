"""FedRep: heads first, then the representation; the numbers, the limits, and heads that never cross."""

import numpy as np
import pytest
import torch
from helpers.refusals import refusal
from lightning.fabric import Fabric
from safetensors.torch import save
from torch import nn

from lit_fedad.contracts import Task
from lit_fedad.federation.client_runner import fit
from lit_fedad.federation.sampling import ClientSampler
from lit_fedad.methods.fedrep import FedRepClient

HEAD = np.array([[1.0, 0.5, 0.25], [-0.5, 1.0, 0.0]])  # weight and bias, side by side
STEP, ROUNDS = 0.1, 3


def with_ones(rows):
    return np.column_stack([rows, np.ones(len(rows))])


def side_by_side(state, layer):
    return np.column_stack([state[f"{layer}.weight"].numpy(), state[f"{layer}.bias"].numpy()])


def by_hand(hand, data, head_epochs, base_epochs, base_first=False):
    """The server's representation, and each client's head, after three rounds of ``|H(W x) - y|^2 / 2``."""
    shared, heads = hand.start, dict.fromkeys(data, HEAD)
    for _ in range(ROUNDS):
        trained = {}
        for client, loader in data.items():
            w, head = shared, heads[client]
            turns = [(base_epochs, "base"), (head_epochs, "head")]
            for epochs, part in turns if base_first else turns[::-1]:
                for x, y in epochs * hand.batches(loader):
                    features = with_ones(x @ w.T)
                    error = (features @ head.T - y) / len(x)
                    if part == "head":
                        head = head - STEP * error.T @ features
                    else:
                        w = w - STEP * (error @ head[:, :2]).T @ x
            heads[client], trained[client] = head, w
        total = sum(len(loader.dataset) for loader in data.values())
        shared = sum(len(data[client].dataset) / total * w for client, w in trained.items())
    return shared, heads


@pytest.fixture
def make_deep(make_linear):
    """Builds the linear task with a linear head behind its features."""

    class Deep(make_linear):
        output_modules = ("head",)

        def __init__(self):
            super().__init__(learning_rate=STEP)
            self.head = nn.Linear(2, 2, dtype=torch.float64)
            self.head.weight.data = torch.tensor(HEAD[:, :2])
            self.head.bias.data = torch.tensor(HEAD[:, 2])

        def objective(self, features, batch):
            return super().objective(self.head(features), batch)

        def predict(self, features, batch):
            return super().predict(self.head(features), batch)

    return Deep


@pytest.fixture
def fedrep(federate, make_deep):
    """Plays FedRep on the linear task with a head."""

    def play(data, rounds=ROUNDS, head_epochs=2, base_epochs=1, base_first=False, **settings):
        client = {"head_epochs": head_epochs, "base_epochs": base_epochs, "base_first": base_first}
        return federate(FedRepClient, task=make_deep(), data=data, rounds=rounds, client=client, **settings)

    return play


@pytest.fixture
def play(federate, make_classifier, make_points):
    """Plays three rounds of two clients on the classifier."""

    def play(head_epochs=2, base_epochs=1, **settings):
        data = {c: make_points(4 + 2 * c, c) for c in range(2)}
        client = {"head_epochs": head_epochs, "base_epochs": base_epochs}
        return federate(
            FedRepClient, task=make_classifier(), data=data, shuffle=True, client=client, **settings
        )

    return play


@pytest.mark.parametrize("clients", [(0, 1), (0,), (0, 0)])
@pytest.mark.parametrize(("head_epochs", "base_epochs"), [(2, 1), (1, 2), (0, 1), (1, 0)])
@pytest.mark.parametrize("base_first", [False, True])
def test_three_rounds_are_the_papers(
    fedrep, hand, points_by_hand, clients, head_epochs, base_epochs, base_first
):
    data = {number: points_by_hand[client] for number, client in enumerate(clients)}
    played = fedrep(data, head_epochs=head_epochs, base_epochs=base_epochs, base_first=base_first)
    shared, heads = by_hand(hand, data, head_epochs, base_epochs, base_first)
    # Double precision: hand and machine differ in the order of sums only.
    np.testing.assert_allclose(side_by_side(played.server.weights, "layer"), shared, rtol=1e-12)
    for client in data:
        own = played.pool.get(client)["own_entries"]
        np.testing.assert_allclose(side_by_side(own, "head"), heads[client], rtol=1e-12)


@pytest.mark.parametrize("base_first", [False, True])
def test_neither_part_moves_while_the_other_trains(make_classifier, make_points, base_first):
    """Not even by the momentum of its last step."""
    client = FedRepClient(make_classifier(), head_epochs=1, base_epochs=1, base_first=base_first)
    seen = []

    def look(*_):
        task = client.task
        seen.append([task.classifier.weight.detach().clone(), task.downsample[0].weight.detach().clone()])

    client.on_before_optimizer_step = look
    fit(client, make_points(4), Fabric(accelerator="cpu", devices=1))
    look()
    head, base = zip(*seen, strict=True)
    first, second = (base, head) if base_first else (head, base)
    assert [torch.equal(a, b) for a, b in zip(first[1:], first, strict=False)] == [False, False, True, True]
    assert [torch.equal(a, b) for a, b in zip(second[1:], second, strict=False)] == [True, True, False, False]


def test_a_loss_without_the_head_leaves_it_as_it_is(federate, make_deep, points_by_hand, exactly):
    """As in the last rounds of AE-1SVM, which train no decoder."""

    class Headless(make_deep):
        def objective(self, features, batch):
            return {"loss": features.square().mean()}

    played = federate(FedRepClient, task=Headless(), data={0: points_by_hand[0]}, rounds=1)
    exactly(played.pool.get(0)["own_entries"]["head.weight"], torch.tensor(HEAD[:, :2]))
    assert not torch.equal(played.server.weights["layer.weight"], make_deep().layer.weight)


def test_heads_never_cross(fedrep, points_by_hand, tap):
    played = fedrep(points_by_hand, channel=tap)
    assert tap.names == {"layer.weight", "layer.bias"}
    size = len(save({"layer.weight": torch.zeros(2, 2).double(), "layer.bias": torch.zeros(2).double()}))
    for report in played.history[-3:]:
        assert report.bytes_up == report.bytes_down == {0: size, 1: size}
    one, other = (played.pool.get(client)["own_entries"]["head.weight"] for client in points_by_hand)
    assert not torch.equal(one, other)


def test_predicts_with_its_own_head_on_the_shared_representation(play, exactly):
    played = play()
    for client in (0, 1):
        predicts = played.history[-1].metrics[client]
        known = {**played.server.weights, **played.pool.get(client)["own_entries"]}
        exactly({name: predicts[name] for name in known}, known)


def test_the_server_s_model_has_the_mean_head(fedrep, hand, points_by_hand, exactly):
    """By data size, over all clients; lending it sends nothing and leaves the clients as they are."""
    played = fedrep(points_by_hand)
    _, heads = by_hand(hand, points_by_hand, 2, 1)
    before = {client: played.pool.get(client) for client in points_by_hand}
    lent = played._lent(ROUNDS)
    np.testing.assert_allclose(side_by_side(lent, "head"), 3 / 5 * heads[0] + 2 / 5 * heads[1], rtol=1e-12)
    found = played.ask(ROUNDS, played.evaluator, [0], "server")[0]
    exactly(found, {**played.server.weights, **lent})
    assert played.client.predictors.server_shared
    exactly({client: played.pool.get(client) for client in points_by_hand}, before)


@pytest.mark.parametrize("of_trainable", [False, True])
def test_a_client_that_fails_at_its_head_leaves_the_next_one_whole(
    federate, make_classifier, make_points, exactly, of_trainable
):
    """Also where the task's optimiser is of what has gradients when it is built, as autoencoders' are."""

    class Own(make_classifier):
        if of_trainable:
            configure_optimizers = Task.configure_optimizers

    class Failing(FedRepClient):
        def training_step(self, batch, batch_idx=0):
            if self.context.client == 0:
                raise RuntimeError("the disk is full")
            return super().training_step(batch, batch_idx)

    data = {c: make_points(4, c) for c in range(2)}
    client, skip = {"head_epochs": 1}, ClientSampler(on_failure="skip")
    failed = federate(Failing, task=Own(), data=data, rounds=1, client=client, sampler=skip)
    alone = federate(FedRepClient, task=Own(), data={1: data[1]}, rounds=1, client=client)
    assert list(failed.history[-1].failures) == [0]
    exactly(failed.server.weights, alone.server.weights)
    exactly(failed.pool.get(1), alone.pool.get(1))
    learnt, start = {**alone.server.weights, **alone.pool.get(1)["own_entries"]}, Own().state_dict()
    for name in ("downsample.1.bias", "classifier.bias"):
        assert not torch.equal(learnt[name], start[name])


def test_a_task_that_is_all_head_is_refused_in_one_line(make_deep):
    task = make_deep()
    task.layer.requires_grad_(False)
    with refusal("task Deep trains nothing but its head as it is set"):
        FedRepClient(task)


def test_a_misspelt_output_module_is_refused_since_heads_would_be_shared(make_deep):
    task = make_deep()
    task.output_modules = ("haed",)
    with refusal(r"output_modules names \['haed'\], which are no modules"):
        FedRepClient(task)


def test_no_epoch_at_all_is_refused_by_its_keys(make_deep):
    with refusal("method.client.head_epochs=0 base_epochs=0"):
        FedRepClient(make_deep(), head_epochs=0, base_epochs=0)


def test_a_task_without_a_head_is_refused_in_one_line(make_task):
    with refusal("fedrep keeps heads personal, and task MemoryBank has none"):
        FedRepClient(make_task())
