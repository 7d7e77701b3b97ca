"""Two processes: `compute` gathers all samples, `summarise` keeps to the clients it is given."""

import pytest

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
def test_two_processes_agree_with_one(in_two_processes):
    for report in in_two_processes(PROGRAM):
        assert report["one_each"] == report["expected"]
        assert report["all_on_one"] == report["expected"]
        assert report["summary"] == report["alone"]
