"""What all metrics share: states that are freed, copied, merged, and gathered from several processes."""

import gc
import json
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


PROGRAM = """
from lit_fedad.metrics.anomaly import AnomalyMetrics
from lit_fedad.metrics.federated import summarise

def metrics(seed):
    random = torch.Generator().manual_seed(seed)
    masks = torch.zeros(4, 8, 8, dtype=torch.bool)
    masks[::2, 3:6, 2:5] = True
    maps = 30 + 4 * torch.randn(4, 8, 8, generator=random) + 5 * masks
    result = AnomalyMetrics()
    result.update(maps.amax(dim=(1, 2)), masks.flatten(1).any(1), maps, masks)
    return result

def values(metrics):
    return {name: float(value) for name, value in metrics.items()}

pooled = metrics(0)
pooled.merge_state(metrics(1))
one_each = metrics(rank)
all_on_one = pooled.clone() if rank == 0 else AnomalyMetrics()  # process 1 has seen nothing
# Unequal numbers of clients a process: gathering here would hang or mix clients up.
summary = summarise({c: metrics(c) for c in ((0, 1) if rank == 0 else (0,))})
report = {
    "expected": values(pooled.compute_local()),
    "one_each": values(one_each.compute()),
    "all_on_one": values(all_on_one.compute()),
    "summary": summary["pro"]["per_client"][0],
    "alone": values(metrics(0).compute_local())["pro"],
}
print(json.dumps(report))
"""


@pytest.mark.slow
def test_two_processes_agree_with_one(forking, tmp_path):
    """The program runs in two gloo processes, each of which knows its ``rank`` and prints JSON."""
    logs = [tmp_path / f"{rank}.log" for rank in range(2)]
    pair = [
        forking.call("helpers.at_once:in_group", [PROGRAM, str(tmp_path), rank], log)
        for rank, log in enumerate(logs)
    ]
    assert [forking.wait(process) for process in pair] == [0, 0], [log.read_text() for log in logs]
    for log in logs:
        report = json.loads(log.read_text().splitlines()[-1])
        assert report["one_each"] == report["expected"]
        assert report["all_on_one"] == report["expected"]
        assert report["summary"] == report["alone"]
