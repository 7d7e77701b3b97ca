"""Prototypes: what is known, moving averages, distances; against loops in NumPy."""

import numpy as np
import pytest
import torch

from lit_fedad.memory.prototypes import Prototypes, class_means

KNOWN = [True, True, False, False]
NEWER = [True, False, True, False]


def prototypes(known, seed):
    vectors = torch.randn(len(known), 5, generator=torch.Generator().manual_seed(seed))
    return Prototypes.unpack(vectors[torch.tensor(known)], torch.tensor(known).nonzero()[:, 0], len(known))


@pytest.fixture
def old():
    """Of classes 0 and 1."""
    return prototypes(KNOWN, seed=0)


@pytest.fixture
def newer():
    """Of classes 0 and 2."""
    return prototypes(NEWER, seed=1)


def same(one, other):
    assert torch.equal(one.vectors, other.vectors)
    assert torch.equal(one.known, other.known)


def test_nothing_is_known_at_first():
    none = Prototypes.none(4, 5)
    assert none.vectors.shape == (4, 5)
    assert not none.known.any()
    vectors, classes = none.pack()
    assert (vectors.shape, classes.shape) == ((0, 5), (0,))
    same(Prototypes.unpack(vectors, classes, 4), none)


def test_packed_are_those_that_there_are(old):
    vectors, classes = old.pack()
    assert torch.equal(vectors, old.vectors[:2])
    assert classes.tolist() == [0, 1]
    assert classes.dtype == torch.int64
    same(Prototypes.unpack(vectors, classes, 4), old)
    same(Prototypes.unpack(vectors.flip(0), classes.flip(0), 4), old)


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_known_classes_move_and_new_ones_are_copied(old, newer, beta):
    moved = old.moved(newer, beta)
    expected = [
        beta * old.vectors[0].numpy() + (1 - beta) * newer.vectors[0].numpy(),
        old.vectors[1].numpy(),
        newer.vectors[2].numpy(),
        np.zeros(5),
    ]
    np.testing.assert_allclose(moved.vectors.numpy(), expected, rtol=1e-6)
    assert moved.known.tolist() == [True, True, True, False]
    assert torch.equal(moved.vectors[1:], torch.tensor(np.stack(expected[1:])).float())


def test_renewed_keeps_what_has_no_successor(old, newer):
    renewed = old.renewed(newer)
    assert renewed.known.tolist() == [True, True, True, False]
    assert torch.equal(renewed.vectors[:3], torch.stack([newer.vectors[0], old.vectors[1], newer.vectors[2]]))


def test_what_is_moved_is_left_as_it_was(old, newer):
    before = [tensor.clone() for tensor in (old.vectors, old.known, newer.vectors, newer.known)]
    old.moved(newer, 0.5)
    old.renewed(newer)
    after = (old.vectors, old.known, newer.vectors, newer.known)
    assert all(map(torch.equal, before, after))


@pytest.mark.parametrize("images", [1, 60])
@pytest.mark.parametrize(("shift", "spread"), [(0, 1), (20, 0.01)])
def test_logits_are_minus_distances(old, images, shift, spread):
    """In whatever batch, and where features are close together and far from zero."""
    known = Prototypes(old.vectors + shift, old.known)
    noise = torch.randn(images, 5, generator=torch.Generator().manual_seed(2))
    features = known.vectors[0] + spread * noise
    found = known.logits(features).numpy()
    vectors = known.vectors.double().numpy()
    for row, z in zip(found, features.double().numpy(), strict=True):
        np.testing.assert_allclose(row[:2], [-np.sqrt(((z - c) ** 2).sum()) for c in vectors[:2]], rtol=1e-5)
        assert (row[2:] == -np.inf).all()


def test_class_means():
    draw = torch.Generator().manual_seed(3)
    features = torch.randn(9, 4, generator=draw, requires_grad=True)
    labels = torch.tensor([2, 0, 2, 2, 0, 4, 2, 4, 0])
    means, counts = class_means(features, labels, 6)
    assert counts.tolist() == [3, 0, 4, 0, 2, 0]
    for label in range(6):
        members = features.detach().numpy()[labels.numpy() == label]
        expected = members.mean(0) if len(members) else np.zeros(4)
        np.testing.assert_allclose(means[label].detach().numpy(), expected, rtol=1e-5, atol=1e-7)
    # Each image moves the mean of its class by its share.
    means[2].sum().backward()
    assert torch.equal(features.grad, (labels == 2)[:, None].float().expand(-1, 4) / 4)
