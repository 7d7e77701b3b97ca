"""Runs experiments in processes of their own, several at a time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from lit_fedad.comparison.plan import PlannedRun
from lit_fedad.report.console import Display
from lit_fedad.report.naming import human_seconds

_POLL_S = 0.05
_INTERRUPT_S = 30  # from an interrupt to a kill


def launch(
    runs: Sequence[PlannedRun],
    jobs: int,
    logs: Path,
    display: Display,
    finished: Callable[[PlannedRun, str | None], None],
    command: Callable[[PlannedRun], list[str]] | None = None,
    verb: str = "",
) -> None:
    """Runs each experiment in a process of its own, whose memory is free again after it.

    A run that fails does not stop the others. An interrupt, of the terminal or of this process alone, or an error
    in `finished` ends all processes before it is raised again.

    Args:
        runs: Runs, begun in this order.
        jobs: Number of processes at a time; they share the cores.
        logs: Folder for the output of the processes.
        display: Prints a line at the beginning and the end of each run.
        finished: Called with each run that ended, and the cause if it failed.
        command: Returns the command line of a run; ``lit-fedad train`` by default.
        verb: Word that announces a run; ``runs`` or ``resumes`` by default.
    """
    command = command or (lambda run: [sys.executable, "-m", "lit_fedad.cli", "train", *run.overrides])
    environment = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // jobs)), **os.environ}
    waiting, running = list(runs), dict[subprocess.Popen[bytes], tuple[PlannedRun, Path, float]]()
    logs.mkdir(parents=True, exist_ok=True)
    # Polled by one thread: Python raises an interrupt in the main thread alone, which must hold every process to end
    # it. A pool of threads in `subprocess.run` would wait for its runs, for hours.
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                run = waiting.pop(0)
                log = logs / f"{run.folder.path.name}.log"
                begun = any((run.folder.path / "checkpoints").glob("round_*"))
                display.note(f"{verb or ('resumes' if begun else 'runs')}: {run.title} ({log})")
                running[_start(command(run), log, environment)] = run, log, time.monotonic()
            time.sleep(_POLL_S)
            for process in [p for p in running if p.poll() is not None]:
                run, log, start = running.pop(process)
                cause = _cause(process.returncode, log)
                if cause:
                    display.warn(f"failed: {run.title}: {cause}")
                else:
                    display.note(f"complete: {run.title}, {human_seconds(time.monotonic() - start)}")
                finished(run, cause)
    finally:
        _end(running)


def _start(command: Sequence[str], log: Path, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    with log.open("wb") as file:
        return subprocess.Popen(  # noqa: S603 - this package, by a list of arguments and without a shell
            command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, env=environment
        )


def _end(processes: Iterable[subprocess.Popen[bytes]]) -> None:
    """Interrupts processes, so that they close their files; kills those that go on."""
    for process in processes:
        process.send_signal(signal.SIGINT)
    for process in processes:
        try:
            process.wait(_INTERRUPT_S)
        except subprocess.TimeoutExpired:
            process.kill()


def _cause(status: int, log: Path) -> str | None:
    """Tells in one line why a process failed; None if it did not."""
    if status == 0:
        return None
    if status < 0:
        return f"ended by {signal.Signals(-status).name}, see {log}"
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return errors[-1] if errors else f"{lines[-1].strip() if lines else f'status {status}'}, see {log}"
