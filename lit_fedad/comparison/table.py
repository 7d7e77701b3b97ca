"""Makes a paper's table: which runs it consists of, running those that are missing, writing what there is."""

from __future__ import annotations

import difflib
import itertools
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import pandas as pd
import yaml

from lit_fedad.config import Config, call, choices, compose, conf_folder
from lit_fedad.errors import UserError
from lit_fedad.experiment.run_folder import RunFolder
from lit_fedad.options import key_and_value
from lit_fedad.report.console import Display
from lit_fedad.report.figures import save_figure, whole_file
from lit_fedad.report.markdown import markdown_table
from lit_fedad.report.naming import human_seconds
from lit_fedad.report.table_figure import rows_figure, tasks_figure
from lit_fedad.report.tables import (
    Outcome,
    Row,
    Setting,
    Table,
    caption,
    costs_table,
    markdown,
    results_table,
    runs_frame,
)
from lit_fedad.tracking.tracker import log_files

_COLUMNS = ("experiment", "data")
_KEYS = ("table", *_COLUMNS, "seeds", "rows", "metrics", "jobs", "out")
_ROOT = "root."
_FIGURES = {"rows": rows_figure, "tasks": tasks_figure}
_PATIENCE_S = 30


@dataclass(frozen=True)
class Column:
    """A column of the table: what its runs are trained and tested on.

    Attributes:
        label: What stands above it.
        names: What its ``root.NAME=`` may be called.
        overrides: What its runs are configured with.
    """

    label: str
    names: tuple[str, ...]
    overrides: tuple[str, ...]


@dataclass(frozen=True)
class Run:
    """One run of the table.

    Attributes:
        row: Label of its row.
        column: Label of its column.
        seed: Its seed.
        words: Its overrides.
        config: What they compose to.
    """

    row: str
    column: str
    seed: int
    words: tuple[str, ...]
    config: Config

    @property
    def folder(self) -> RunFolder:
        """Where its files lie, whichever command runs it."""
        return RunFolder.of(self.config)

    @property
    def title(self) -> str:
        """How a person calls it."""
        return f"{self.row} on {self.column}, seed {self.seed}"


def report(words: Sequence[str], display: Display) -> None:
    """Makes a table, running what is missing and resuming what was begun.

    Args:
        words: ``key=value`` pairs: ``table``; ``experiment`` and ``data`` (comma lists: the columns), ``root.NAME``
            (where a column's data lie), ``seeds``, ``rows``, ``metrics`` (comma lists), ``jobs``, ``out``; any other
            goes to every run.
        display: Says what happens.

    Raises:
        UserError: For bad input, before anything runs; and at the end, if runs failed.
    """
    given, common = _split(words)
    name, table = read_table(given.get("table", ""))
    if "metrics" in given:
        # The paper's numbers stand by the table's own metrics.
        rows = [replace(row, paper={}) for row in table.rows]
        table = replace(table, metrics=given["metrics"].split(","), rows=rows)
    rows = _pick_rows(name, table, given.get("rows"))
    jobs, seeds = _numbers("jobs", given.get("jobs", "1")), _numbers("seeds", given.get("seeds", "0,1,2"))
    if len(jobs) > 1 or jobs[0] < 1:
        raise UserError(f"jobs={given['jobs']} must be one number, at least 1")
    columns = _columns(table, given)
    asked = not given.keys().isdisjoint(_COLUMNS)
    if not asked:
        columns = _with_data(columns, common, display)
    runs = plan(rows, columns, common, seeds)
    chosen = dict.fromkeys(part for column in columns for part in column.names) if asked else ()
    out = Path(given.get("out") or "-".join([f"reports/{name}", *chosen]))
    comparison = Comparison(name, table, runs, out)
    comparison.write()
    waiting, total = comparison.waiting(), len(comparison.folders)
    display.note(f"{total} runs, {total - len(waiting)} of them complete: {out}")
    play(waiting, jobs[0], out / "logs", display, comparison.take)
    comparison.show(display)
    tracking = runs[0].config["tracking"]
    delivery = log_files(
        comparison.files, out, "reports", {"table": name}, tracking["uri"], tracking["enabled"]
    )
    if delivery.pending:
        display.warn(f"{delivery.pending} tracking records are kept in {out}; the same command sends them")
    if comparison.causes:
        failed = len(comparison.causes)
        raise UserError(f"{failed} of {total} runs failed; the same command tries them again")


def read_table(name: str) -> tuple[str, Table]:
    """A table of ``conf/table``.

    Args:
        name: Its file's name, or the end of it that tells it from the others: ``fig8`` for ``feddymem_fig8``.

    Returns:
        Its full name, and the table.

    Raises:
        UserError: If there is no such table, or its file does not describe one.
    """
    names = choices("table")
    found = [n for n in names if n == name] or [n for n in names if name and n.endswith(f"_{name}")]
    if len(found) != 1:
        raise UserError(f"table={name}: give one of {', '.join(found or names)}")
    where = f"conf/table/{found[0]}.yaml"
    section = yaml.safe_load((conf_folder() / "table" / f"{found[0]}.yaml").read_text())
    for key in ("rows", "beyond"):
        section[key] = [call(Row, row, f"{where}: {key}") for row in section.get(key, [])]
    for label, column in section["columns"].items():
        if isinstance(column, Mapping):
            section["columns"][label] = call(Setting, column, f"{where}: columns: {label}")
    return found[0], call(Table, section, where)


def plan(
    rows: Sequence[Row], columns: Sequence[Column], common: Sequence[str], seeds: Sequence[int]
) -> list[Run]:
    """All runs of a table, composed, so that what is misspelt is refused before anything runs.

    Raises:
        UserError: Naming row and column.
    """
    runs = []
    composed: dict[tuple[str, ...], Config] = {}  # rows may share runs
    for row, column, seed in itertools.product(rows, columns, seeds):
        words = (*common, *column.overrides, *row.overrides, f"seed={seed}")
        try:
            composed[words] = composed.get(words) or compose(words)
        except UserError as error:
            raise UserError(f"row {row.label}, column {column.label}: {error}") from error
        runs.append(Run(row.label, column.label, seed, words, composed[words]))
    return runs


def play(
    runs: Sequence[Run],
    jobs: int,
    logs: Path,
    display: Display,
    finished: Callable[[Run, str | None], None],
    command: Callable[[Run], list[str]] | None = None,
) -> None:
    """Runs each in a process of its own, which gives its memory back; one that fails does not stop the others.

    Args:
        runs: What to run, in this order.
        jobs: How many at a time; they share the cores.
        logs: Folder for what the processes print.
        display: Says what begins and ends.
        finished: Is told of each run that ended, with the cause if it failed.
        command: The command line of a run; ``lit-fedad train`` by default.
    """
    command = command or (lambda run: [sys.executable, "-m", "lit_fedad.cli", "train", *run.words])
    environment = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // jobs)), **os.environ}
    waiting, playing = list(runs), dict[subprocess.Popen[bytes], tuple[Run, Path, float]]()
    logs.mkdir(parents=True, exist_ok=True)
    try:
        while waiting or playing:
            while waiting and len(playing) < jobs:
                run = waiting.pop(0)
                log = logs / f"{run.folder.path.name}.log"
                begun = any((run.folder.path / "checkpoints").glob("round_*"))
                display.note(f"{'resumes' if begun else 'runs'}: {run.title} ({log})")
                playing[_start(command(run), log, environment)] = run, log, time.monotonic()
            time.sleep(0.05)
            for process in [p for p in playing if p.poll() is not None]:
                run, log, start = playing.pop(process)
                cause = _cause(process.returncode, log)
                if cause:
                    display.warn(f"failed: {run.title}: {cause}")
                else:
                    display.note(f"complete: {run.title}, {human_seconds(time.monotonic() - start)}")
                finished(run, cause)
    finally:
        _end(playing)


class Comparison:
    """A table as it stands: its runs, their results so far, and its files.

    Args:
        name: The table's.
        table: What it shows.
        runs: What it consists of.
        out: Where its files go.
    """

    def __init__(self, name: str, table: Table, runs: Sequence[Run], out: Path) -> None:
        self.table, self.runs = table, runs
        self.chosen = list(dict.fromkeys(run.row for run in runs))
        self.endings = {row.label: row.ending for row in (*table.rows, *table.beyond)}
        # The paper's numbers belong to its settings, or to its data whatever preset they were chosen by.
        self.columns: dict[str, str] = {
            run.column: run.column
            if isinstance(table.columns.get(run.column), Setting)
            else run.config["data"].get("name") or ""
            for run in runs
        }
        self.files = [out / f"{name}.md", out / f"{name}.csv"]
        if table.figure in _FIGURES:
            self.files.append(out / f"{name}.png")
        # Rows may share runs, which go by the first: one run may hold several classifiers.
        self.folders: dict[Path, Run] = {}
        for run in runs:
            self.folders.setdefault(run.folder.path, run)
        self.causes: dict[Path, str] = {}
        self.results: dict[Path, dict[str, Any]] = {}
        for path, run in self.folders.items():
            if not run.config["fresh"] and (result := run.folder.result()):
                self.results[path] = result

    def waiting(self) -> list[Run]:
        """What is still to be run."""
        return [run for path, run in self.folders.items() if path not in self.results]

    def take(self, run: Run, cause: str | None) -> None:
        """Takes in a run that has ended."""
        path = run.folder.path
        if cause:
            self.causes[path] = cause
        elif result := run.folder.result():
            self.results[path] = result
        self.write()

    def write(self) -> None:
        """Writes the table so far: nothing that was measured is lost with what comes later."""
        frame = self.frame()
        with whole_file(self.files[0]) as part:
            part.write_text(markdown(self.table, self.chosen, self.columns, frame))
        with whole_file(self.files[1]) as part:
            frame.to_csv(part, index=False)
        if draw := _FIGURES.get(self.table.figure):
            save_figure(draw(self.table, list(self.columns), frame), self.files[2])

    def frame(self) -> pd.DataFrame:
        """One line a run."""
        outcomes = [
            Outcome(
                run.row,
                run.column,
                run.seed,
                str(run.folder.path),
                self.results.get(run.folder.path),
                self.causes.get(run.folder.path),
                self.endings[run.row],
            )
            for run in self.runs
        ]
        return runs_frame(outcomes, self.table.metrics)

    def show(self, display: Display) -> None:
        """Prints the table: column by column where all of them side by side are too wide."""
        frame = self.frame()
        rows = [row for row in (*self.table.rows, *self.table.beyond) if row.label in self.chosen]
        whole = results_table(self.table, rows, self.columns, frame)
        width = markdown_table(list(whole.columns), whole.to_numpy().tolist()).index("\n")
        tables = [whole]
        if width > shutil.get_terminal_size((120, 0)).columns:
            tables = [
                results_table(self.table, rows, {column: data}, frame)
                for column, data in self.columns.items()
            ]
        display.note("")
        display.note(self.table.title)
        for table in (*tables, costs_table(self.table, rows, frame)):
            display.table(cast("list[dict[str, str]]", table.to_dict("records")))
            display.note("")
        for line in caption(self.table, list(self.columns), frame):
            display.note(line)
        display.where_next([*(("file", str(file)) for file in self.files), ("compare", "mlflow ui")])


def _split(words: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """What the table is made of, and what goes to every run."""
    given, common = {}, []
    for word in words:
        if word.startswith("~"):  # Hydra's way to leave a key out
            common.append(word)
            continue
        key, value = key_and_value(word)
        if key == "seed":
            raise UserError("a table has several seeds: give seeds=0,1,2")
        if key in _KEYS or key.startswith(_ROOT):
            given[key] = value
        else:
            common.append(word)
    return given, common


def _numbers(key: str, text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise UserError(f"{key}={text} must be whole numbers, separated by commas") from error


def _pick_rows(name: str, table: Table, text: str | None) -> list[Row]:
    """The rows asked for, in the table's order; all of them by default."""
    rows = {row.label.casefold(): row for row in (*table.rows, *table.beyond)}
    chosen = list(rows) if text is None else [part.strip().casefold() for part in text.split(",")]
    for label in chosen:
        if label not in rows:
            close = difflib.get_close_matches(label, rows, n=1, cutoff=0.0)
            raise UserError(f"rows={label}: {name} has no such row; did you mean '{rows[close[0]].label}'?")
    return [row for label, row in rows.items() if label in chosen]


def _columns(table: Table, given: Mapping[str, str]) -> list[Column]:
    """The paper's columns, or one for each experiment and data asked for; each with its root, where it is given."""
    asked = [[(key, name) for name in given[key].split(",")] for key in _COLUMNS if key in given]
    columns = []
    for choice in itertools.product(*asked) if asked else ():
        # What all columns have in common need not stand above them.
        telling = [name for (_, name), names in zip(choice, asked, strict=True) if len(names) > 1]
        label = ", ".join(telling) or choice[-1][1]
        overrides = tuple(f"{key}={name}" for key, name in choice)
        columns.append(Column(label, tuple(name for _, name in choice), overrides))
    if not asked:
        for label, column in table.columns.items():
            if isinstance(column, Setting):
                overrides = (*table.protocol, f"data={column.data}", *column.overrides)
                columns.append(Column(label, (column.data,), overrides))
            else:
                overrides = (*table.protocol, f"data={column}")
                columns.append(Column(label, (column, label.casefold()), overrides))
    roots = {key.removeprefix(_ROOT): value for key, value in given.items() if key.startswith(_ROOT)}
    known = dict.fromkeys(name for column in columns for name in column.names)
    for name in roots:
        if name not in known:
            raise UserError(f"{_ROOT}{name}: no such column; one of {', '.join(known)}")
    return [
        replace(
            c, overrides=(*c.overrides, *(f"data.root={roots[name]}" for name in c.names if name in roots))
        )
        for c in columns
    ]


def _with_data(columns: Sequence[Column], common: Sequence[str], display: Display) -> list[Column]:
    """Those of the paper's columns whose data are at hand."""
    at_hand = []
    for column in columns:
        if any(word.startswith("data.root=") for word in (*column.overrides, *common)):
            at_hand.append(column)
        else:
            display.note(f"left out: {column.label}; to take it in, give {_ROOT}{column.names[0]}=DIR")
    if not at_hand:
        raise UserError("no data given: root.NAME=DIR for the paper's, or else experiment=NAME or data=NAME")
    return at_hand


def _start(command: Sequence[str], log: Path, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    with log.open("wb") as file:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, env=environment
        )


def _end(processes: Iterable[subprocess.Popen[bytes]]) -> None:
    """Interrupts what still plays, so that it closes what it has open; a checkpoint survives a kill as well."""
    for process in processes:
        process.send_signal(signal.SIGINT)
    for process in processes:
        try:
            process.wait(_PATIENCE_S)
        except subprocess.TimeoutExpired:
            process.kill()


def _cause(status: int, log: Path) -> str | None:
    """Why a run failed, in one line; None if it did not."""
    if status == 0:
        return None
    if status < 0:
        return f"ended by {signal.Signals(-status).name}, see {log}"
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    told = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return told[-1] if told else f"{lines[-1].strip() if lines else f'status {status}'}, see {log}"
