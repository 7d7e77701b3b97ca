"""SED's terms: distributions over queues, their loss, the queues, and the teachers' weights."""

from collections import deque
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import torch
from helpers.distillation import naive_loss, weights_by_hand
from helpers.draws import rows, units
from helpers.refusals import refusal

from lit_fedad.methods.parts.ensemble_distillation import (
    InstanceQueues,
    attend,
    distillation_loss,
    teacher_weights,
)


@pytest.mark.parametrize("own_key", [False, True])
def test_attending_is_a_softmax(own_key):
    z, keys, own = units(4, 5), units(9, 5, seed=1), units(4, 5, seed=2)
    value, mean = attend(z, keys, 0.2, own if own_key else None)
    for i in range(4):
        seen = np.vstack([keys, own[i : i + 1]]) if own_key else keys.numpy()
        exponents = np.exp(seen @ z[i].numpy() / 0.2)
        assert float(value[i]) == pytest.approx(np.log(exponents.sum()), rel=1e-12)
        np.testing.assert_allclose(mean[i].numpy(), exponents @ seen / exponents.sum(), rtol=1e-10)


def test_attending_at_a_low_temperature_does_not_overflow():
    value, mean = attend(units(4, 5).float(), units(9, 5, seed=1).float(), 1e-4)
    best = (units(4, 5) @ units(9, 5, seed=1).T).max(1)
    np.testing.assert_allclose(value.numpy(), best.values.numpy() / 1e-4, rtol=1e-4)
    np.testing.assert_allclose(mean.numpy(), units(9, 5, seed=1)[best.indices].numpy(), atol=1e-5)


@pytest.mark.parametrize("own_key", [False, True])
@pytest.mark.parametrize(("hot", "cold"), [(0.07, 0.07), (0.5, 0.1), (0.05, 0.4)])
def test_the_loss_and_its_gradient_are_those_of_the_full_cross_entropy(own_key, hot, cold):
    teachers, queues = units(3, 6, 5, seed=1), units(3, 11, 5, seed=2)
    weights = torch.tensor([0.5, 0.5, 0.0]).double()
    ours, naive = (units(6, 5).requires_grad_() for _ in range(2))
    found = distillation_loss(ours, teachers, queues, weights, hot, cold, own_key)
    expected = naive_loss(naive, teachers, queues, weights, hot, cold, own_key)
    (3 * found).backward()
    (3 * expected).backward()
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(ours.grad, naive.grad, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("own_key", [False, True])
def test_a_key_that_is_queued_twice_counts_twice(own_key):
    teachers, queues, counts = units(3, 6, 5, seed=1), units(3, 4, 5, seed=2), torch.tensor([1, 3, 2, 1])
    weights = torch.tensor([0.5, 0.2, 0.3]).double()
    ours, naive = (units(6, 5).requires_grad_() for _ in range(2))
    found = distillation_loss(ours, teachers, queues, weights, 0.07, 0.1, own_key, counts)
    repeated = queues.repeat_interleave(counts, dim=1)
    expected = naive_loss(naive, teachers, repeated, weights, 0.07, 0.1, own_key)
    found.backward()
    expected.backward()
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(ours.grad, naive.grad, rtol=1e-9, atol=1e-12)


def queued(queues: InstanceQueues) -> torch.Tensor:
    """All keys of all teachers, each as often as it is queued [C, Q, D]."""
    keys, counts = queues.keys()
    return torch.stack(list(keys)).repeat_interleave(counts, dim=1)


def test_queues_start_with_random_directions_of_their_own():
    draw = torch.Generator().manual_seed(0)
    found, again = (
        queued(InstanceQueues(units(2, 5, 3).float(), 200, draw.manual_seed(0))) for _ in range(2)
    )
    assert found.shape == (2, 200, 3)
    torch.testing.assert_close(found.norm(dim=2), torch.ones(2, 200))
    assert found.mean(1).abs().max() < 0.2
    assert not torch.equal(*found)
    assert torch.equal(found, again)


@pytest.mark.parametrize("batches", [[3, 3, 3, 3], [2, 7, 4], [7], [9, 3, 8, 1, 5], [1] * 9])
@pytest.mark.parametrize("again", [False, True])
def test_the_oldest_entries_leave_first(batches, again):
    embeddings, draw = units(2, 30, 3).float(), torch.Generator().manual_seed(0)
    queues = InstanceQueues(embeddings, 7, draw)
    expected = [deque(map(tuple, keys.tolist()), maxlen=7) for keys in queued(queues)]
    order = torch.arange(30) % 9 if again else torch.arange(30)
    for images in order[: sum(batches)].split(batches):
        queues.push(images)
        for keys, own, rest in zip(queued(queues), embeddings, expected, strict=True):
            rest.extend(map(tuple, own[images].tolist()))
            assert sorted(map(tuple, keys.tolist())) == sorted(rest)
    keys, _ = queues.keys()
    assert all(len(own) == len(set(rest)) for own, rest in zip(keys, expected, strict=True))


def test_a_queue_that_does_not_fit_names_one_that_does(monkeypatch):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=100_000))
    with refusal(r"distillation\.queue=10000: .* give a queue of 1 to 520$"):
        InstanceQueues.check(3, 10_000, 8, torch.device("cpu"))
    InstanceQueues.check(3, 520, 8, torch.device("cpu"))


def test_teachers_weigh_as_much_as_they_correlate_with_their_mean():
    common = rows(60, seed=9)
    noise = torch.tensor([0.1, 1.0, 3.0, 0.5])[:, None]
    scale, shift = torch.tensor([[1.0], [50.0], [0.01], [3.0]]), torch.tensor([[0.0], [7.0], [-2.0], [100.0]])
    scores = scale * (common + noise * rows(4, 60)) + shift
    found = teacher_weights(scores)
    np.testing.assert_allclose(found.numpy(), weights_by_hand(scores.numpy()), rtol=1e-5)
    assert found.dtype == torch.float32
    assert len(set(found.tolist())) == 4


def test_a_teacher_against_the_others_counts_nothing():
    common = rows(60, seed=9)
    scores = torch.stack([common + 0.1 * rows(60), common + 0.1 * rows(60, seed=1), -common])
    found = teacher_weights(scores)
    assert found[2] == 0
    np.testing.assert_allclose(found.numpy(), weights_by_hand(scores.numpy()), rtol=1e-5)


def test_without_agreement_weights_are_uniform():
    own = rows(60).float()
    assert teacher_weights(torch.stack([own, -own])).tolist() == [0.5, 0.5]
    assert teacher_weights(torch.full((4, 10), 0.1)).tolist() == [0.25] * 4
    assert teacher_weights(torch.zeros(3, 1)).tolist() == pytest.approx([1 / 3] * 3)


def test_a_teacher_of_constant_scores_counts_nothing():
    own = rows(60).float()
    assert teacher_weights(torch.stack([own, torch.full((60,), 0.1)])).tolist() == [1, 0]
