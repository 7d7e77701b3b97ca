"""Reports a paper's table (``lit-fedad report table=NAME``): runs what is missing and writes what there is."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from lit_fedad.comparison.catalogue import listing
from lit_fedad.comparison.forms_table import report_forms
from lit_fedad.comparison.launch import launch
from lit_fedad.comparison.plan import (
    Column,
    PlannedRun,
    add_roots,
    choose_rows,
    own_columns,
    paper_columns,
    plan_runs,
    read_table,
)
from lit_fedad.comparison.results import TableResults
from lit_fedad.config import Config, compose
from lit_fedad.errors import UserError
from lit_fedad.options import read, separate
from lit_fedad.report.console import Display
from lit_fedad.tracking.tracker import log_files


@dataclass(frozen=True)
class TableOptions:
    """Options of ``lit-fedad report table=NAME``.

    Attributes:
        table: Name of a table of ``conf/table``, or an ending that no other name has; ``list`` for all of the papers.
        experiment: Presets in place of the paper's settings: one column each.
        data: Data sets in place of the paper's: one column each.
        root: Folders of data, by the name of a column's data or preset (``root.mpdd=DIR``).
        seeds: Seeds of the runs of each row and column.
        rows: Labels of the rows to show; all by default.
        metrics: Metrics to show in place of the table's.
        jobs: Number of runs at a time.
        out: Folder of the table; ``reports/`` with its name and columns by default.

    Raises:
        UserError: If there is no seed, or less than one job.
    """

    table: str = ""  # refused, with the names of the tables
    experiment: tuple[str, ...] = ()
    data: tuple[str, ...] = ()
    root: Mapping[str, str] = field(default_factory=dict)
    seeds: tuple[int, ...] = (0, 1, 2)
    rows: tuple[str, ...] = ()
    metrics: tuple[str, ...] = ()
    jobs: int = 1
    out: str | None = None

    def __post_init__(self) -> None:
        if not self.seeds:
            raise UserError("seeds= must be whole numbers, separated by commas")
        if self.jobs < 1:
            raise UserError(f"jobs={self.jobs} must be at least 1")


def report_table(options: Sequence[str], display: Display) -> None:
    """Makes a table: runs what is missing, resumes what was begun, and writes Markdown, CSV and a figure.

    Args:
        options: Those of `TableOptions`; all others are overrides of every run.
        display: Prints progress and the table.

    Raises:
        UserError: For bad input, before anything runs; and at the end, if runs failed.
    """
    if any(option.startswith("seed=") for option in options):
        raise UserError("a table has several seeds: give seeds=0,1,2")
    declared, common = separate(TableOptions, options, "report")
    chosen, _ = read(TableOptions, declared, "report")
    if chosen.table == "list":
        display.table(listing())
        return
    name, table = read_table(chosen.table)
    if chosen.metrics:
        # The paper's numbers stand by the table's own metrics.
        rows = [replace(row, paper={}) for row in table.rows]
        table = replace(table, metrics=chosen.metrics, rows=rows)
    rows = choose_rows(name, table, chosen.rows)
    own = own_columns(chosen.experiment, chosen.data)
    names = dict.fromkeys(name for column in own for name in column.names)
    out = Path(chosen.out or "-".join([f"reports/{name}", *names]))
    if table.cells != "runs":
        if own or chosen.metrics:
            raise UserError(
                f"table={name}: counts what the paper's settings send; leave experiment=, data= and metrics= out"
            )
        files = report_forms(name, table, rows, paper_columns(table), common, out, display)
        _deliver(name, files, compose(common), out, display)
        return
    columns = add_roots(own or paper_columns(table), chosen.root)
    if not own:
        columns = _with_data(columns, common, display)
    runs = plan_runs(rows, columns, common, chosen.seeds)
    results = TableResults(name, table, runs, out)
    results.write()
    missing, total = results.missing(), len(results.runs)
    display.note(f"{total} runs, {total - len(missing)} of them complete: {out}")
    launch(missing, chosen.jobs, out / "logs", display, results.add)
    if waiting := results.to_attack():
        command = partial(_attack, table.attack)
        launch(waiting, chosen.jobs, out / "logs" / "attacks", display, results.add, command, "attacks")
    results.show(display)
    _deliver(name, results.files, runs[0].config, out, display)
    if results.causes:
        failed = len(results.causes)
        raise UserError(f"{failed} of {total} runs failed; the same command tries them again")


def _attack(options: Sequence[str], run: PlannedRun) -> list[str]:
    """Returns the command line of an attack on a complete run."""
    return [sys.executable, "-m", "lit_fedad.cli", "privacy", f"run={run.folder.path}", *options]


def _deliver(name: str, files: Sequence[Path], config: Config, out: Path, display: Display) -> None:
    """Logs the files of a table to MLflow."""
    tracking = config["tracking"]
    files = [file for file in files if file.is_file()]  # no figure before the first run
    delivery = log_files(files, out, "reports", {"table": name}, tracking["uri"], tracking["enabled"])
    if delivery.pending:
        display.warn(f"{delivery.pending} tracking records are kept in {out}; the same command sends them")


def _with_data(columns: Sequence[Column], common: Sequence[str], display: Display) -> list[Column]:
    """Leaves out columns whose data were not given, and says so."""
    if any(override.startswith("data.root=") for override in common):
        return list(columns)
    kept = [column for column in columns if column.has_root]
    for column in columns:
        if column not in kept:
            display.note(f"left out: {column.label}; to take it in, give root.{column.names[0]}=DIR")
    if not kept:
        raise UserError("no data given: root.NAME=DIR for the paper's, or else experiment=NAME or data=NAME")
    return kept
