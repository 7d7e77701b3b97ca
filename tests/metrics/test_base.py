"""What all metrics share."""

import gc
import weakref
from copy import deepcopy

import pytest
import torch

from lit_fedad.metrics.anomaly import AnomalyMetrics
from lit_fedad.metrics.base import union


def seen() -> AnomalyMetrics:
    metrics = AnomalyMetrics(pixel=False)
    metrics.update(torch.tensor([0.1, 0.9]), torch.tensor([0, 1]))
    return metrics


def made_anew(metrics):
    return metrics


@pytest.fixture
def no_collector():
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("copied", [made_anew, deepcopy, lambda metrics: union([metrics, seen()])])
def test_a_metric_is_freed_with_its_last_use(copied, no_collector):
    metrics = copied(seen())
    metrics.compute()
    last = weakref.ref(metrics)
    del metrics
    assert last() is None


def test_updates_are_counted_without_gradients():
    scores = torch.tensor([0.1, 0.9], requires_grad=True)
    metrics = AnomalyMetrics(pixel=False)
    metrics.update(scores, torch.tensor([0, 1]))
    metrics.update(scores, torch.tensor([0, 1]))
    assert metrics.update_count == 2
    assert not metrics.image_scores[0].requires_grad


def test_a_value_before_any_update_is_warned_of():
    with pytest.warns(UserWarning, match="before the ``update``"):
        AnomalyMetrics(pixel=False).compute()
