"""Metrics in several processes."""

import json
import os
import subprocess
import sys

import pytest

_PREAMBLE = """
import json, sys
import torch
import torch.distributed as dist
# Before the group: of forty pairs that imported it afterwards, four processes were aborted at their end.
import lit_fedad.metrics.continual

rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2)
"""
_END = """
dist.destroy_process_group()
"""


@pytest.fixture
def in_two_processes(tmp_path):
    """Runs a program, which knows its ``rank``, in two gloo processes; what each printed last, from JSON."""

    def run(program: str) -> list:
        command = [sys.executable, "-W", "ignore", "-c", _PREAMBLE + program + _END]
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
        return [json.loads(output.splitlines()[-1]) for output in outputs]

    return run
