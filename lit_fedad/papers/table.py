"""Reports a paper's table (``lit-fedad report table=NAME``): runs what is missing and writes what there is."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from lit_fedad.core.config import Config, compose, unresolved
from lit_fedad.core.errors import UserError
from lit_fedad.papers.forms import report_forms
from lit_fedad.papers.paper import TableResults
from lit_fedad.papers.plan import (
    Column,
    PlannedRun,
    add_roots,
    choose_rows,
    listing,
    own_columns,
    paper_columns,
    plan_runs,
    read_table,
)
from lit_fedad.report.console import Display
from lit_fedad.report.naming import human_seconds
from lit_fedad.tracking.tracker import Tracker

_POLL_S = 0.05
_INTERRUPT_S = 30  # seconds from an interrupt to a kill


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

    Output goes to a file in `logs` for each run. `finished` is called with each run that ended, and the cause if it
    failed; `command` returns the command line of a run (by default ``lit-fedad train``), and `verb` announces it.
    """
    command = command or (lambda run: [sys.executable, "-m", "lit_fedad", "train", *run.overrides])
    environment = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // jobs)), **os.environ}
    waiting, running = list(runs), dict[subprocess.Popen[bytes], tuple[PlannedRun, Path, float]]()
    logs.mkdir(parents=True, exist_ok=True)
    # One thread polls all processes: Python raises an interrupt only in the main thread, which must know a process to
    # end it. A pool of threads in `subprocess.run` would wait for its runs, for hours.
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                run = waiting.pop(0)
                log = logs / f"{run.folder.path.name}.log"
                is_begun = any((run.folder.path / "checkpoints").glob("round_*"))
                display.note(f"{verb or ('resumes' if is_begun else 'runs')}: {run.title} ({log})")
                with log.open("wb") as file:
                    process = subprocess.Popen(  # noqa: S603 - this package, by a list of arguments and without a shell
                        command(run),
                        stdin=subprocess.DEVNULL,
                        stdout=file,
                        stderr=subprocess.STDOUT,
                        env=environment,
                    )
                running[process] = run, log, time.monotonic()
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


def _end(processes: Iterable[subprocess.Popen[bytes]]) -> None:
    """Interrupts processes, so that they close their files; kills those that go on nevertheless."""
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


def report_table(
    overrides: Sequence[str],
    display: Display,
    table: str = "",
    experiment: tuple[str, ...] = (),
    data: tuple[str, ...] = (),
    root: Mapping[str, str] = MappingProxyType({}),
    seeds: tuple[int, ...] = (0, 1, 2),
    rows: tuple[str, ...] = (),
    metrics: tuple[str, ...] = (),
    jobs: int = 1,
    out: str | None = None,
) -> None:
    """Makes a paper's table: runs what is missing, resumes what was begun, and writes Markdown, CSV and a figure.

    Args:
        overrides: Overrides of the configuration of all runs.
        display: Prints progress, the table, and where the files are.
        table: Name of a table of ``conf/table``; ``list`` for all of the papers.
        experiment: Presets in place of the paper's settings: one column each.
        data: Data sets in place of the paper's: one column each.
        root: Folders of data, by the name of a column's data or preset (``root.mpdd=DIR``).
        seeds: Seeds of the runs of each row and column.
        rows: Labels of the rows to show; all by default.
        metrics: Metrics to show in place of the table's.
        jobs: Number of runs at a time.
        out: Folder of the table; ``reports/`` with its name and columns by default.

    Raises:
        UserError: For bad input, before anything runs; and at the end, if runs failed.
    """
    if not seeds:
        raise UserError("seeds= must be whole numbers, separated by commas")
    if jobs < 1:
        raise UserError(f"jobs={jobs} must be at least 1")
    if table == "list":
        display.table(listing())
        return
    paper = read_table(table)
    if metrics:
        # The paper's numbers belong to the table's own metrics.
        paper = replace(paper, metrics=metrics, rows=[replace(row, paper={}) for row in paper.rows])
    chosen_rows = choose_rows(table, paper, rows)
    given_columns = own_columns(experiment, data)
    names = dict.fromkeys(name for column in given_columns for name in column.names)
    folder = Path(out or "-".join([f"reports/{table}", *names]))
    if paper.cells != "runs":
        if given_columns or metrics:
            raise UserError(
                f"table={table}: counts what the paper's settings send; leave experiment=, data= and metrics= out"
            )
        files = report_forms(table, paper, chosen_rows, paper_columns(paper), overrides, folder, display)
        log_table(table, files, compose(overrides), folder, display)
        return
    columns = add_roots(given_columns or paper_columns(paper), root)
    if not given_columns:
        columns = _with_data(columns, overrides, display)
    runs = plan_runs(chosen_rows, columns, overrides, seeds)
    results = TableResults(table, paper, runs, folder)
    results.write()
    missing, total = results.missing(), len(results.runs)
    display.note(f"{total} runs, {total - len(missing)} of them complete: {folder}")
    launch(missing, jobs, folder / "logs", display, results.add)
    if to_attack := results.to_attack():

        def attack(run: PlannedRun) -> list[str]:
            return [sys.executable, "-m", "lit_fedad", "privacy", f"run={run.folder.path}", *paper.attack]

        launch(to_attack, jobs, folder / "logs" / "attacks", display, results.add, attack, "attacks")
    results.show(display)
    if metrics and (lacking := results.unmeasured()):
        display.warn(
            f"metrics={','.join(lacking)}: no run has measured it; a run's result.json names what it has"
        )
    log_table(table, results.files, runs[0].config, folder, display)
    if results.causes:
        failed = len(results.causes)
        raise UserError(f"{failed} of {total} runs failed; the same command tries them again")


def log_table(name: str, files: Sequence[Path], config: Config, out: Path, display: Display) -> None:
    """Logs the files of a table to MLflow."""
    tracking = config["tracking"]
    tracker = Tracker(out, "reports", out.name, {"table": name}, tracking["uri"], tracking["enabled"])
    for file in files:
        if file.is_file():  # no figure before the first run
            tracker.artifact(file)
    if kept := tracker.close().kept:
        display.warn(f"{kept} tracking records are kept in {out}; the same command sends them")


def _with_data(columns: Sequence[Column], common: Sequence[str], display: Display) -> list[Column]:
    """Leaves out columns whose data were not given, and says so."""

    def has_root(overrides: Sequence[str]) -> bool:
        return any(override.startswith("data.root=") for override in overrides)

    if has_root(common):
        return list(columns)
    given = [column for column in columns if has_root(column.overrides) or not _needs_root(column)]
    for column in columns:
        if column not in given:
            display.note(f"left out: {column.label}; to take it in, give root.{column.names[0]}=DIR")
    if not given:
        raise UserError("no data given: root.NAME=DIR for the paper's, or else experiment=NAME or data=NAME")
    return given


def _needs_root(column: Column) -> bool:
    """Tells whether a column's data are files that only the user can name."""
    missing = "???"  # Hydra's sign of a value without default
    return bool(unresolved(column.overrides)["data"].get("root") == missing)
