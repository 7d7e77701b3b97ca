"""Runs in processes of their own: how many at a time, how they fail and how an interrupt ends them."""

import sys

import pytest

from lit_fedad.core.config import compose
from lit_fedad.papers.plan import PlannedRun
from lit_fedad.papers.table import launch
from lit_fedad.report.console import Display


def a_run(seed):
    overrides = ("data=textures", f"seed={seed}", "tracking=off")
    return PlannedRun("Local", "textures", seed, overrides, compose(overrides))


def test_an_interrupt_ends_the_processes(tmp_path):
    # A shell that starts the tests in the background has them, and so this process, ignore interrupts.
    slow = (
        "import pathlib, signal, time; signal.signal(signal.SIGINT, signal.default_int_handler);"
        "pathlib.Path('began').touch(); time.sleep(60); pathlib.Path('slept').touch()"
    )

    def command(run):
        wait = "import pathlib, time\nwhile not pathlib.Path('began').exists(): time.sleep(0.01)"
        return [sys.executable, "-c", wait if run.seed == 0 else slow]

    def finished(run, cause):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        launch([a_run(0), a_run(1)], 2, tmp_path / "logs", Display(quiet=True), finished, command)
    assert not (tmp_path / "slept").exists()
    logs = "".join(path.read_text() for path in (tmp_path / "logs").iterdir())
    assert "KeyboardInterrupt" in logs


@pytest.mark.parametrize(
    ("code", "cause"),
    [
        ("raise SystemExit(0)", None),
        ("print('error: one'); print('error: two'); print('x'); raise SystemExit(2)", "two"),
        ("raise ValueError('odd')", "ValueError: odd, see "),
        ("raise SystemExit(7)", "status 7, see "),
        ("import os; os.kill(os.getpid(), 9)", "ended by SIGKILL, see "),
    ],
)
def test_cause_of_a_failure_is_one_line(code, cause, tmp_path):
    causes = []
    launch(
        [a_run(0)],
        1,
        tmp_path,
        Display(quiet=True),
        lambda run, c: causes.append(c),
        lambda run: [sys.executable, "-c", code],
    )
    (log,) = tmp_path.glob("*.log")
    assert causes == [cause + str(log) if cause and cause.endswith("see ") else cause]


def test_processes_share_the_cores_and_no_more_run_than_jobs(tmp_path, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    code = """
import os, pathlib, sys, time
seed, here = sys.argv[1], pathlib.Path()
running = here / f"running-{seed}"
running.touch()
(here / f"begun-{seed}").touch()
deadline = time.monotonic() + 60
while not ((here / "begun-0").exists() and (here / "begun-1").exists()):  # the first two run at a time
    assert time.monotonic() < deadline
    time.sleep(0.01)
print(os.environ["OMP_NUM_THREADS"], len(list(here.glob("running-*"))))
running.unlink()
"""
    launch(
        [a_run(seed) for seed in range(5)], 2, tmp_path / "logs", Display(quiet=True), lambda run, c: None,
        lambda run: [sys.executable, "-c", code, str(run.seed)],
    )  # fmt: skip
    printed = [path.read_text().split() for path in (tmp_path / "logs").iterdir()]
    assert [threads for threads, _ in printed] == ["4"] * 5
    assert max(int(count) for _, count in printed) <= 2
