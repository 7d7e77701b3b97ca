"""CReFF: gradients of classes, features that match them, the classifier trained on these, and the whole method."""

from functools import partial

import numpy as np
import pytest
import torch
from helpers.draws import rows
from helpers.encoder import Encoder
from safetensors.torch import save
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lit_fedad.contracts import Context, Update
from lit_fedad.contracts.state import state_of
from lit_fedad.methods.creff import (
    BIAS,
    CLASSES,
    GRADIENTS,
    WEIGHT,
    CReFFClient,
    CReFFServer,
    cross_entropy_gradient,
    match,
    matching_loss,
    mean_gradients,
    train_classifier,
)
from lit_fedad.methods.fedavg import FedAvgClient
from lit_fedad.tasks.classifier import Classifier

K, WIDTH = 4, Encoder.num_features
QUICK = {"features_per_class": 6, "matching_steps": 4, "retraining_epochs": 3}

nearly = partial(torch.testing.assert_close, rtol=1e-4, atol=1e-6)


def make(augment: bool = True) -> Classifier:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Classifier(Encoder(), K, augment=augment, learning_rate=0.1)


def images(labels, seed: int = 0) -> DataLoader:
    draw = torch.Generator().manual_seed(seed)
    rows = [{"image": torch.randn(3, 8, 8, generator=draw) + label, "label": label} for label in labels]
    return DataLoader(rows, batch_size=4)


def by_autograd(classifier, features, label, **options) -> torch.Tensor:
    """The gradient of the mean cross-entropy of one class [K, d + 1]."""
    weight, bias = (
        part.detach().clone().requires_grad_() for part in (classifier[:, :-1], classifier[:, -1])
    )
    loss = F.cross_entropy(F.linear(features, weight, bias), torch.full((len(features),), label))
    return torch.column_stack(torch.autograd.grad(loss, [weight, bias], **options))


def side_by_side(message) -> torch.Tensor:
    return torch.column_stack([message[WEIGHT], message[BIAS]])


@pytest.fixture
def data():
    """Client 0 holds classes 0, 1 and 3, client 1 only 1, client 2 classes 1 and 2."""
    return {0: images([0, 1, 3, 0, 1, 0], 0), 1: images([1, 1, 1, 1], 1), 2: images([2, 1, 2, 2, 2], 2)}


@pytest.fixture
def creff(federate, data):
    """Plays CReFF on the three clients, with a quick server."""

    def play(client=None, **settings):
        client = {"draws": 2, **(client or {})}
        settings = {
            "client": client,
            "task": make(),
            "data": data,
            "server": QUICK,
            "shuffle": True,
            **settings,
        }
        return federate(CReFFClient, CReFFServer, **settings)

    return play


def test_the_gradient_is_that_of_autograd_and_of_numpy():
    classifier, features = rows(K, WIDTH + 1), rows(3, 7, WIDTH, seed=1)
    classes = torch.tensor([2, 0, 3])
    found = cross_entropy_gradient(classifier, features, F.one_hot(classes, K)[:, None])
    for own, z, label in zip(found, features, classes.tolist(), strict=True):
        torch.testing.assert_close(own, by_autograd(classifier, z, label))
        by_hand = np.zeros((K, WIDTH + 1))
        for image in z.numpy():
            exponents = np.exp(classifier.numpy() @ [*image, 1])
            residual = exponents / exponents.sum()
            residual[label] -= 1
            by_hand += np.outer(residual, [*image, 1]) / len(z)
        np.testing.assert_allclose(own.numpy(), by_hand, rtol=1e-12)


def test_clients_that_hold_a_class_count_the_same_for_it():
    sent = [
        {GRADIENTS: torch.stack([torch.full((2, 3), v) for v in values]), CLASSES: torch.tensor(classes)}
        for values, classes in [((1.0, 2.0), (0, 5)), ((6.0,), (5,)), ((4.0, 8.0), (5, 7))]
    ]
    held, mean = mean_gradients(*(torch.cat([one[name] for one in sent]) for name in (GRADIENTS, CLASSES)))
    assert held.tolist() == [0, 5, 7]
    assert mean.dtype == torch.float32
    assert mean.shape == (3, 2, 3)
    assert mean[:, 0, 0].tolist() == mean[:, 1, 2].tolist() == [1, 4, 8]


def test_gradients_are_of_what_was_received_in_evaluation_mode(creff, data, tap):
    """Of the received base and the re-trained classifier, not of the one that trains, nor of trained weights."""
    creff(task=make(augment=False), rounds=2, channel=tap, client={"local_epochs": 2})
    for round in (1, 2):
        broadcast = next(message for at, client, message in tap.sent if at == round and client is None)
        task = make(augment=False).eval()
        task.load_state_dict({n: e for n, e in broadcast.items() if n not in (WEIGHT, BIAS)})
        for client, message in tap.uploads(round).items():
            pictures, labels = (torch.cat([b[n] for b in data[client]]).detach() for n in ("image", "label"))
            features = task.encoder(pictures).detach()
            expected = {
                c: by_autograd(side_by_side(broadcast), features[labels == c], c)
                for c in sorted(set(labels.tolist()))
            }
            assert message[CLASSES].tolist() == list(expected)
            nearly(message[GRADIENTS], torch.stack(list(expected.values())))
    assert not torch.equal(broadcast[WEIGHT], broadcast["classifier.weight"])


def test_draws_are_of_distinct_images_of_one_class(data, monkeypatch):
    task, seen = make(augment=False).eval(), []
    client = CReFFClient(task, draws=8, batch=2)
    server = CReFFServer(client)
    for part in (client, server):
        part.context = Context(0, 1)
    client.receive(server.broadcast(0))
    monkeypatch.setattr(task, "view", lambda batch: seen.append(batch) or batch)
    message = client.send(data[0])
    assert [batch["label"].tolist() for batch in seen] == [[0, 0]] * 8 + [[1, 1]] * 8 + [[3]] * 8
    places = []
    for batch in seen:
        labels = batch["label"].tolist()
        same = [
            [torch.equal(own, row["image"]) and row["label"] == labels[0] for row in data[0].dataset]
            for own in batch["image"]
        ]
        places.append([row.index(True) for row in same])
        assert len(set(places[-1])) == len(labels)
    # Class 0 has three images, of which two are drawn anew each time.
    assert len({frozenset(drawn) for drawn in places[:8]}) > 1
    drawn = task.encoder(torch.cat([batch["image"] for batch in seen[:8]])).detach()
    nearly(message[GRADIENTS][0], by_autograd(side_by_side(server.auxiliary), drawn, 0))


def test_images_are_the_tasks_views_and_draws_depend_on_the_place_alone(creff, data, tap, exactly):
    creff(rounds=1, channel=tap, shuffle=False)
    augmented = {c: message[GRADIENTS] for c, message in tap.uploads(1).items()}
    tap.sent.clear()
    # Other clients, other batches and other steps of training do not matter.
    creff(rounds=1, channel=tap, shuffle=True, data={2: data[2]}, client={"local_epochs": 3})
    exactly(tap.uploads(1)[2][GRADIENTS], augmented[2])
    tap.sent.clear()
    creff(rounds=1, channel=tap, task=make(augment=False))
    assert not torch.allclose(tap.uploads(1)[2][GRADIENTS], augmented[2])


# --------------------------------------------------------------------------------------------- matching


def test_the_matching_loss_by_hand():
    """One feature z = 1 of class 0, logits (0, 0): its gradient is (-1/2, 1/2) in weight and bias alike."""
    classifier, classes = torch.zeros(2, 2), torch.tensor([0])
    features = torch.ones(1, 1, 1)
    for wanted, loss in [
        ([[-1.0, -3.0], [5.0, 3.0]], 0.0),  # rows point the same way, biases too: length is nothing
        ([[1.0, -3.0], [5.0, 3.0]], 2.0),  # one row turned round
        ([[-1.0, 1.0], [5.0, -1.0]], 2.0),  # the biases, one row together, turned round
        ([[-1.0, 0.0], [5.0, 1.0]], 1 - 0.5**0.5),  # biases at 45 degrees
    ]:
        found = matching_loss(features, classes, torch.tensor([wanted]), classifier)
        assert float(found) == pytest.approx(loss, abs=1e-6)


def loss_by_autograd(features, label, wanted, classifier) -> torch.Tensor:
    found = by_autograd(classifier, features, label, create_graph=True)
    pairs = [*zip(found[:, :-1], wanted[:, :-1], strict=True), (found[:, -1], wanted[:, -1])]
    return sum(1 - (a @ b) / (a.norm() * b.norm()) for a, b in pairs)


def test_matching_is_sgd_class_by_class():
    classifier, features, wanted = (
        rows(K, WIDTH + 1),
        rows(3, 6, WIDTH, seed=1),
        rows(3, K, WIDTH + 1, seed=2),
    )
    classes = torch.tensor([3, 0, 1])
    found, before, after = match(features, classes, wanted, classifier, steps=3, learning_rate=0.7)
    losses = {0: 0.0, 3: 0.0}
    for own, z, label, gradient in zip(found, features, classes.tolist(), wanted, strict=True):
        z = z.clone().requires_grad_()
        for step in range(4):
            loss = loss_by_autograd(z, label, gradient, classifier)
            if step in losses:
                losses[step] += float(loss.detach())
            if step < 3:
                z = (z - 0.7 * torch.autograd.grad(loss, z)[0]).detach().requires_grad_()
        torch.testing.assert_close(own, z.detach())
    assert (before, after) == pytest.approx((losses[0], losses[3]))
    assert torch.equal(features, rows(3, 6, WIDTH, seed=1))


# -------------------------------------------------------------------------------- the classifier, and the server


def test_retraining_is_plain_sgd():
    features, labels = rows(10, WIDTH).float(), torch.arange(10) % K
    torch.manual_seed(0)
    layer = nn.Linear(WIDTH, K)
    start = nn.Linear(WIDTH, K)
    start.load_state_dict(layer.state_dict())
    state = torch.get_rng_state()
    weight, bias = train_classifier(start, features, labels, 3, 0.2, 4)
    torch.set_rng_state(state)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.2)
    for _ in range(3):
        for batch in torch.randperm(10).split(4):
            optimizer.zero_grad()
            F.cross_entropy(layer(features[batch]), labels[batch]).backward()
            optimizer.step()
    nearly(weight, layer.weight.detach())
    nearly(bias, layer.bias.detach())
    assert not torch.equal(weight, start.weight)


def update(server, gradients, classes) -> Update:
    return Update({**server.weights, GRADIENTS: gradients.float(), CLASSES: torch.tensor(classes)}, 10)


def test_features_live_on_and_classes_never_seen_are_left_out(exactly):
    settings = {**QUICK, "matching_rate": 0.3, "retraining_rate": 0.2, "batch_size": 5}
    server = CReFFServer(CReFFClient(make()), **settings)
    first = torch.randn(K, 6, WIDTH, generator=Context(0, 1).generator("federated features"))
    initial = side_by_side(server.auxiliary).clone()
    wanted = rows(2, K, WIDTH + 1).float()
    server.context = Context(0, 1)
    server.aggregate({0: update(server, wanted[:1], [1]), 1: update(server, wanted[1:], [3])})
    held, before, after = match(first[[1, 3]], torch.tensor([1, 3]), wanted, initial, 4, 0.3)
    exactly(server.features[[1, 3]], held)
    exactly(server.features[[0, 2]], first[[0, 2]])
    assert server.diagnostics() == {"matching_loss_before": before, "matching_loss_after": after}
    assert after < before
    assert server.seen.tolist() == [False, True, False, True]

    def retrained(round, features, labels):
        with Context(0, round).seeded("classifier re-training"):
            labels = torch.tensor(labels).repeat_interleave(6)
            weight, bias = train_classifier(nn.Linear(WIDTH, K), features.flatten(0, 1), labels, 3, 0.2, 5)
        return {WEIGHT: weight, BIAS: bias}

    exactly(server.auxiliary, retrained(1, held, [1, 3]))
    # Class 1 is not held in this round: its features stay, and are trained on.
    server.context = Context(0, 2)
    classifier = side_by_side(server.auxiliary)
    server.aggregate({2: update(server, wanted, [0, 3])})
    second = match(torch.stack([first[0], held[1]]), torch.tensor([0, 3]), wanted, classifier, 4, 0.3)[0]
    exactly(server.features, torch.stack([second[0], held[0], first[2], second[1]]))
    exactly(server.auxiliary, retrained(2, server.features[[0, 1, 3]], [0, 1, 3]))


def test_the_number_of_threads_does_not_matter(exactly):
    class Wide(nn.Module):
        num_features = 256

    def learnt(threads):
        torch.manual_seed(0)
        server = CReFFServer(
            CReFFClient(Classifier(Wide(), 10)), features_per_class=40, matching_steps=3, retraining_epochs=1
        )
        server.context = Context(0, 1)
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            server.aggregate({0: update(server, rows(10, 10, 257), list(range(10)))})
            assert torch.get_num_threads() == threads
        finally:
            torch.set_num_threads(before)
        return state_of(server)

    exactly(learnt(2), learnt(1))


# ------------------------------------------------------------------------------------------------ as a whole


@pytest.mark.parametrize("fraction", [1.0, 0.5])
def test_weights_are_fedavgs_number_for_number(federate, creff, data, exactly, fraction):
    settings = {"data": data, "shuffle": True, "fraction": fraction, "client": {"local_epochs": 2}}
    ours, theirs = creff(**settings), federate(FedAvgClient, task=make(), **settings)
    exactly(ours.server.weights, theirs.server.weights)
    assert [r.per_client for r in ours.history] == [r.per_client for r in theirs.history]
    # The classifier that predicts is another one.
    assert not torch.allclose(ours.server.auxiliary[WEIGHT], ours.server.weights["classifier.weight"])


def test_the_federated_base_predicts_with_the_retrained_classifier(creff, exactly):
    played = creff()
    head = {
        "classifier.weight": played.server.auxiliary[WEIGHT],
        "classifier.bias": played.server.auxiliary[BIAS],
    }
    expected = {**played.server.weights, **head}
    exactly(played.history[-1].metrics, dict.fromkeys((0, 1, 2), expected))
    client = played.client
    assert client.predictors.shared
    assert not client.predictors.own
    broadcast = played.server.broadcast(0)
    client.receive(broadcast)
    exactly(client.shared_state(), played.server.weights)
    client.deploy("server")
    exactly(client.shared_state(), expected)
    client.receive(broadcast)
    exactly(client.shared_state(), played.server.weights)


def test_before_the_first_round_the_initial_classifier_predicts(exactly):
    client = CReFFClient(make())
    server = CReFFServer(client, **QUICK)
    for part in (client, server):
        part.context = Context(0, 1)
    initial = client.shared_state()
    client.receive(server.broadcast(0))
    client.deploy()
    exactly(client.shared_state(), initial)


def test_what_crosses(creff, tap):
    """Up: the weights, |C_k| z (d + 1) floats, and as many class numbers. Down: weights and a classifier."""
    played = creff(channel=tap)
    for report in played.history:
        for client, held in {0: 3, 1: 1, 2: 2}.items():
            extra = {
                GRADIENTS: torch.zeros(held, K, WIDTH + 1),
                CLASSES: torch.zeros(held, dtype=torch.int64),
            }
            assert report.bytes_up[client] == len(save({**played.server.weights, **extra}))
            assert report.bytes_down[client] == len(
                save({**played.server.weights, WEIGHT: torch.zeros(K, WIDTH), BIAS: torch.zeros(K)})
            )
    assert tap.names == {*played.server.weights, GRADIENTS, CLASSES, WEIGHT, BIAS}
