"""What a model confuses, by hand: importance, hard negatives and the loss that separates classes."""

import numpy as np
import pytest
import torch
from helpers.draws import normals
from torch.nn import functional as F

from lit_fedad.condensation.relations import (
    RelationalContrast,
    class_means,
    hard_negatives,
    importance,
    merged_prototypes,
)


def logits(n: int = 6, k: int = 4, seed: int = 0) -> torch.Tensor:
    return normals(n, k, seed=seed)


LABELS = torch.tensor([0, 1, 2, 3, 0, 1])


@pytest.mark.parametrize("alpha", [0.0, 1.0])
def test_at_the_ends_of_alpha_one_model_alone_judges(alpha):
    now, before = logits(), logits(seed=1)
    judge = now if alpha else before
    assert torch.equal(importance(now, before, LABELS, alpha), importance(judge, judge, LABELS))


def test_it_is_logits_that_are_mixed_not_errors():
    """Two models that are each surely wrong about another class are, together, in doubt."""
    one, two, label = torch.tensor([[0.0, 20, 0]]), torch.tensor([[0.0, 0, 20]]), torch.tensor([0])
    mixed = float(importance(one, two, label, bias=10.0))
    error = 10 + np.log(2 + np.exp(-10))
    assert mixed == pytest.approx(1 / (1 + np.exp(10 - error)), rel=1e-5)


def test_the_larger_the_error_the_likelier():
    margin = torch.linspace(-4, 4, 9)
    values = torch.stack([margin, torch.zeros(9)], 1)
    found = importance(values, values, torch.zeros(9, dtype=torch.int64))
    assert (found.diff() < 0).all()


@pytest.mark.parametrize("bias", [0.0, 0.7, 3.0])
def test_an_error_of_b_is_half_as_important_as_can_be(bias):
    """Logits (x, 0) of label 0 with error b: log(1 + e^-x) = b."""
    x = 50.0 if bias == 0 else -np.log(np.expm1(bias))
    values = torch.tensor([[x, 0.0]], dtype=torch.float64)
    assert float(importance(values, values, torch.tensor([0]), bias=bias)) == pytest.approx(0.5, rel=1e-6)


def test_a_larger_bias_tells_images_further_apart():
    """The ratio of an image that is wrong to one that is right: 2 at b = 0, e^err at most."""
    values = torch.tensor([[9.0, 0.0], [0.0, 9.0]], dtype=torch.float64)
    ratios = []
    for bias in (0.0, 0.7, 3.0, 30.0):
        right, wrong = importance(values, values, torch.zeros(2, dtype=torch.int64), bias=bias)
        ratios.append(float(wrong / right))
    assert ratios == sorted(ratios)
    assert ratios[0] == pytest.approx(2, rel=1e-3)
    assert ratios[-1] == pytest.approx(np.exp(9.0), rel=1e-3)


def directions(count: int = 4, width: int = 5, seed: int = 0) -> torch.Tensor:
    return F.normalize(normals(count, width, seed=seed), dim=1)


ALL_OTHERS = ~torch.eye(4, dtype=torch.bool)


def test_the_order_of_clients_does_not_matter():
    sent = torch.cat([normals(2, 3), normals(3, 3, seed=1)])
    sizes, classes = torch.tensor([7, 90, 1, 5, 30]), torch.tensor([0, 2, 0, 1, 2])
    found = merged_prototypes(sent, sizes, classes, 3)
    other = merged_prototypes(sent.flip(0), sizes.flip(0), classes.flip(0), 3)
    assert torch.equal(found, other)
    by_hand = (90 * sent[1].numpy() + 30 * sent[4].numpy()) / 120
    np.testing.assert_allclose(found[2].numpy(), by_hand, rtol=1e-5)


def test_a_million_images_do_not_drown_one():
    """In single precision, the sum of ten million ones is what it was before the next one came."""
    sent = torch.tensor([[1.0], [1001.0]])
    found = merged_prototypes(sent, torch.tensor([10**8, 1]), torch.tensor([0, 0]), 1)
    assert float(found[0, 0]) > 1


@pytest.mark.parametrize("k", [1, 2, 3, 50])
def test_there_are_as_many_hard_negatives_as_asked_for_and_others_are(k):
    found = hard_negatives(normals(4, 4), torch.ones(4, dtype=torch.bool), k)
    assert found.sum(1).tolist() == [min(k, 3)] * 4
    assert not found.diagonal().any()


def test_opposite_features_have_no_prototype():
    one = normals(1, 3)
    found = class_means(torch.cat([one, -one, one]), torch.tensor([0, 0, 1]), 2)
    assert not found[0].any()
    torch.testing.assert_close(found[1], F.normalize(one, dim=1)[0])


def test_the_class_itself_bounds_the_loss():
    """Features that lie on their own prototype, far from others: ever lower without it, never below 0 with it."""
    prototypes = torch.eye(4)
    bounded, literal = (
        RelationalContrast(prototypes, ALL_OTHERS, 8, temperature=0.01, with_own=own).eval()
        for own in (True, False)
    )
    for loss in (bounded, literal):
        loss.head = torch.nn.Identity()
    found = [float(loss(prototypes, torch.arange(4))) for loss in (bounded, literal)]
    assert found[0] == pytest.approx(0, abs=1e-6)
    assert found[1] == pytest.approx(np.log(3) - 100, rel=1e-5)


def test_features_are_drawn_to_their_class_and_away_from_negatives_alone():
    """The gradient in what h says: towards the own prototype, against hard negatives, nothing of the others."""
    prototypes, negatives = torch.eye(4), torch.zeros(4, 4, dtype=torch.bool)
    negatives[0, 1] = True
    loss = RelationalContrast(prototypes, negatives)
    loss.head = torch.nn.Identity()
    z = torch.full((2, 4), 0.5).requires_grad_()
    (gradient,) = torch.autograd.grad(loss(z, torch.tensor([0, 3])), z)
    assert gradient[0, 0] < 0 < gradient[0, 1]
    assert gradient[0, 2:].abs().max() < 1e-6
    assert not gradient[1].any()


def test_only_the_direction_counts():
    loss = RelationalContrast(directions(), ALL_OTHERS)
    loss.head = torch.nn.Identity()
    z, labels = normals(6, 5, seed=1), torch.tensor([0, 1, 2, 3, 0, 1])
    assert float(loss(z, labels)) == pytest.approx(float(loss(7 * z, labels)), rel=1e-5)


def test_images_that_cannot_be_judged_change_nothing():
    """Neither those of a class without prototype nor those of one without negatives."""
    prototypes, negatives = directions(), ALL_OTHERS.clone()
    prototypes[2], negatives[3] = 0, False
    negatives[:, 2] = False
    loss = RelationalContrast(prototypes, negatives).eval()
    z = normals(4, 5, seed=1)
    all_four, two = loss(z, torch.arange(4)), loss(z[:2], torch.arange(2))
    assert float(all_four.detach()) == pytest.approx(float(two.detach()), rel=1e-5)
    all_four.backward()
    assert all(p.grad.isfinite().all() for p in loss.parameters())


def test_prototypes_stand_still_and_h_learns():
    torch.manual_seed(0)
    prototypes = directions()
    loss = RelationalContrast(prototypes, ALL_OTHERS, hidden=16, temperature=0.1)
    assert {name for name, _ in loss.named_buffers()} >= {"prototypes", "candidates"}
    optimizer = torch.optim.Adam(loss.parameters(), lr=0.01)
    z, labels = normals(12, 5, seed=1), torch.arange(12) % 4
    curve = []
    for _ in range(60):
        value = loss(z, labels)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        curve.append(float(value.detach()))
    assert curve[-1] < 0.5 * curve[0]
    assert torch.equal(loss.prototypes, directions())


@pytest.mark.parametrize("temperature", [0.1, 1.0])
def test_the_loss_is_a_mean_over_images(temperature):
    loss = RelationalContrast(directions(), ALL_OTHERS, temperature=temperature).eval()
    z, labels = normals(5, 5, seed=1), torch.tensor([0, 1, 2, 3, 0])
    alone = [float(loss(z[[i]], labels[[i]]).detach()) for i in range(5)]
    assert float(loss(z, labels).detach()) == pytest.approx(np.mean(alone), rel=1e-5)


def test_without_a_rival_in_the_batch_there_is_nothing_to_contrast():
    torch.manual_seed(0)
    contrast = RelationalContrast(directions(), ALL_OTHERS, 8, with_own=False, prior=True)
    features = normals(6, 5).requires_grad_()
    loss = contrast(features, torch.zeros(6, dtype=torch.long))
    loss.backward()
    assert float(loss.detach()) == 0
    assert not features.grad.any()
