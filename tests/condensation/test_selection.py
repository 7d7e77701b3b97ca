"""Importance of images: its limits, and what its settings turn off."""

import numpy as np
import pytest
import torch

from lit_fedad.condensation.relations import importance


def logits(n: int = 6, k: int = 4, seed: int = 0) -> torch.Tensor:
    return torch.randn(n, k, generator=torch.Generator().manual_seed(seed))


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
