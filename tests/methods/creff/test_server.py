"""CReFF's server: features matched with gradients, and the classifier trained on them."""

import pytest
import torch
from helpers.creff import QUICK, WIDTH, K, by_autograd, make, nearly, side_by_side
from helpers.draws import rows
from torch import nn
from torch.nn import functional as F

from lit_fedad.contracts import Context, Update
from lit_fedad.contracts.state import state_of
from lit_fedad.methods.creff import (
    BIAS,
    CLASSES,
    GRADIENTS,
    WEIGHT,
    CReFFClient,
    CReFFServer,
    match,
    matching_loss,
    train_classifier,
)
from lit_fedad.tasks.classifier import Classifier


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


# ------------------------------------------------------------------------------------------------- the classifier


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
    server = CReFFServer(CReFFClient(make()), **QUICK)
    first = torch.randn(K, 6, WIDTH, generator=Context(0, 1).generator("federated features"))
    initial = side_by_side(server.auxiliary).clone()
    wanted = rows(2, K, WIDTH + 1).float()
    server.context = Context(0, 1)
    server.aggregate({0: update(server, wanted[:1], [1]), 1: update(server, wanted[1:], [3])})
    held, before, after = match(first[[1, 3]], torch.tensor([1, 3]), wanted, initial, 4, 0.1)
    exactly(server.features[[1, 3]], held)
    exactly(server.features[[0, 2]], first[[0, 2]])
    assert server.diagnostics() == {"matching_loss_before": before, "matching_loss_after": after}
    assert after < before
    assert server.seen.tolist() == [False, True, False, True]

    def retrained(round, features, labels):
        with Context(0, round).seeded("classifier re-training"):
            labels = torch.tensor(labels).repeat_interleave(6)
            weight, bias = train_classifier(nn.Linear(WIDTH, K), features.flatten(0, 1), labels, 3, 0.01, 32)
        return {WEIGHT: weight, BIAS: bias}

    exactly(server.auxiliary, retrained(1, held, [1, 3]))
    # Class 1 is not held in this round: its features stay, and are trained on.
    server.context = Context(0, 2)
    classifier = side_by_side(server.auxiliary)
    server.aggregate({2: update(server, wanted, [0, 3])})
    second = match(torch.stack([first[0], held[1]]), torch.tensor([0, 3]), wanted, classifier, 4, 0.1)[0]
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
