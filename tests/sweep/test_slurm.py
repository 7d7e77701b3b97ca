"""The array job, with Slurm's commands played by scripts."""

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "sweeps" / "slurm" / "sweep.sbatch"
PATIENCE = 120  # seconds; what is waited for takes a moment, on however busy a machine
WORKER = """\
#!/usr/bin/env bash
printf '%s\\n' "$@" > {log}/arguments
trap 'echo gave back > {log}/gave_back; exit 0' USR1
touch {log}/started
for _ in $(seq {tenths}); do sleep 0.1; done
exit {status}
"""


@pytest.fixture
def cluster(tmp_path):
    """A PATH on which srun runs its command and scontrol writes down what it is told."""
    for name, text in {
        "srun": 'exec "$@"',
        "scontrol": f'echo "$@" > {tmp_path}/requeued',
    }.items():
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (tmp_path / name).chmod(0o755)

    def submit(tenths=0, status=0, **environment):
        worker = tmp_path / "lit-fedad"
        worker.write_text(WORKER.format(log=tmp_path, tenths=tenths, status=status))
        worker.chmod(0o755)
        path = f"{tmp_path}:{os.environ['PATH']}"
        job = {"SLURM_JOB_ID": "71", "SLURM_ARRAY_JOB_ID": "70", "SLURM_ARRAY_TASK_ID": "1"}
        return subprocess.Popen(
            ["bash", str(SCRIPT)],
            env={"PATH": path, **job, **environment},
            stderr=subprocess.PIPE,
            text=True,
        )

    return submit


def test_script_asks_slurm_for_requeue_and_a_signal():
    lines = [line for line in SCRIPT.read_text().splitlines() if line.startswith("#SBATCH")]
    assert {"#SBATCH --requeue", "#SBATCH --signal=B:USR1@300"} <= {*lines}
    assert subprocess.run(["bash", "-n", str(SCRIPT)], check=False).returncode == 0


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_shellcheck_finds_nothing():
    assert subprocess.run(["shellcheck", str(SCRIPT)], check=False).returncode == 0


def test_environment_becomes_the_worker_s_options(cluster, tmp_path):
    job = cluster(
        STUDY="feddymem_th", STORAGE="postgresql://u:p@h/db?a=b", OUT="/x y", ARGS="rounds=3 grid=8"
    )
    assert job.wait(PATIENCE) == 0
    arguments = (tmp_path / "arguments").read_text().splitlines()
    assert arguments[:2] == ["sweep", "study=feddymem_th"]
    assert sorted(arguments[2:]) == sorted(
        ["out=/x y", "storage=postgresql://u:p@h/db?a=b", "rounds=3", "grid=8"]
    )
    assert not (tmp_path / "requeued").exists()


def test_time_limit_reaches_the_worker_and_requeues_its_task(cluster, tmp_path):
    job = cluster(tenths=6000, STUDY="feddymem_th")
    end = time.monotonic() + PATIENCE
    while not (tmp_path / "started").exists():
        assert time.monotonic() < end
        time.sleep(0.02)
    job.send_signal(signal.SIGUSR1)
    assert job.wait(PATIENCE) == 0
    assert (tmp_path / "gave_back").exists()
    assert (tmp_path / "requeued").read_text().split() == ["requeue", "70_1"]


def test_failure_is_the_job_s(cluster, tmp_path):
    assert cluster(status=2, STUDY="feddymem_th").wait(PATIENCE) == 2
    job = cluster()
    assert job.wait(PATIENCE) != 0
    assert "name of a study file" in job.stderr.read()
    assert not (tmp_path / "requeued").exists()
