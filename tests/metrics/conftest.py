"""Metrics in several processes."""

import contextlib
import json
import os
import signal
import subprocess
import sys

import pytest

_PREAMBLE = """
import json, os, sys
import torch
import torch.distributed as dist
# Before the group: of forty pairs that imported it afterwards, four processes were aborted at their end.
import lit_fedad.metrics.continual

other = os.fork()
rank = 0 if other else 1
sys.stdout = open(f"{sys.argv[1]}/{rank}.json", "w")
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}/store", rank=rank, world_size=2)
"""
_END = """
dist.destroy_process_group()
sys.stdout.close()
sys.exit(os.waitstatus_to_exitcode(os.waitpid(other, 0)[1]) if other else 0)
"""


@pytest.fixture
def in_two_processes(tmp_path):
    """Runs a program, which knows its ``rank``, in two gloo processes, forked from one that has imported torch.

    It returns what each printed last, from JSON.
    """

    def run(program: str) -> list:
        command = [sys.executable, "-W", "ignore", "-c", _PREAMBLE + program + _END, str(tmp_path)]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        pair = subprocess.Popen(command, env=environment, start_new_session=True)
        try:
            assert pair.wait(timeout=120) == 0
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pair.pid, signal.SIGKILL)
        return [json.loads((tmp_path / f"{rank}.json").read_text().splitlines()[-1]) for rank in range(2)]

    return run
