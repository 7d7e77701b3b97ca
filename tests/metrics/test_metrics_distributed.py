"""Two processes: `compute` gathers all samples, `summarise` keeps to the clients it is given."""

import json
import os
import subprocess
import sys

import pytest

PROGRAM = """
import json, sys
import torch
import torch.distributed as dist
from lit_fedad.metrics.anomaly import AnomalyMetrics
from lit_fedad.metrics.federated import summarise

rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2)

def metrics(seed, exact):
    random = torch.Generator().manual_seed(seed)
    masks = torch.zeros(4, 8, 8, dtype=torch.bool)
    masks[::2, 3:6, 2:5] = True
    maps = 30 + 4 * torch.randn(4, 8, 8, generator=random) + 5 * masks
    result = AnomalyMetrics(exact=exact)
    result.update(maps.amax(dim=(1, 2)), masks.flatten(1).any(1), maps, masks)
    return result

def values(metrics):
    return {name: float(value) for name, value in metrics.items()}

report = {}
for exact in (False, True):
    pooled = metrics(0, exact)
    pooled.merge_state(metrics(1, exact))
    one_each = metrics(rank, exact)
    all_on_one = pooled.clone() if rank == 0 else AnomalyMetrics(exact=exact)  # process 1 has seen nothing
    report[str(exact)] = {
        "expected": values(pooled.compute_local()),
        "one_each": values(one_each.compute()),
        "all_on_one": values(all_on_one.compute()),
        # Unequal numbers of clients a process: gathering here would hang or mix clients up.
        "summary": summarise({c: metrics(c, exact) for c in ((0, 1) if rank == 0 else
        (0,))})["pro"]["per_client"][0], "alone": values(metrics(0, exact).compute_local())["pro"],
    }
print(json.dumps(report))
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_two_processes_agree_with_one(tmp_path):
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(tmp_path / "store")], stdout=subprocess.PIPE, env=environment
        )
        for rank in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=120)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0]
    for output in outputs:
        for report in json.loads(output.splitlines()[-1]).values():
            assert report["one_each"] == report["expected"]
            assert report["all_on_one"] == report["expected"]
            assert report["summary"] == report["alone"]
