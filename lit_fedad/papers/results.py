"""The results of a paper's table so far, and the files that show them."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pandas as pd
from matplotlib.figure import Figure

from lit_fedad.core.errors import UserError
from lit_fedad.core.files import atomic
from lit_fedad.core.text import csv_cell
from lit_fedad.experiment.run_folder import RunFolder
from lit_fedad.papers.plan import PlannedRun
from lit_fedad.papers.runs import CompleteRun
from lit_fedad.report.closing import CONSTANT_LABELS
from lit_fedad.report.console import Display
from lit_fedad.report.figures import save_figure
from lit_fedad.report.html import markdown_table
from lit_fedad.report.table_figures import (
    rounds_figure,
    rounds_frame,
    rows_figure,
    sheets_figure,
    tasks_figure,
)
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


def with_attack(result: Mapping[str, Any], folder: RunFolder) -> dict[str, Any]:
    """Adds what membership inference found to a run's last round.

    Raises:
        UserError: If the attack's file cannot be read.
    """
    found = folder.attacks().get("lira", {})
    numbers = {name: {"mean": value} for name, value in found.items() if isinstance(value, float)}
    return {**result, "last": {**result["last"], **numbers}}


def attacked(run: CompleteRun) -> CompleteRun:
    """Returns a complete run whose last round has what membership inference found; see `with_attack`."""
    return replace(run, result=with_attack(run.result, RunFolder(run.files)))


class TableResults:
    """A table with the results of its runs so far.

    Attributes:
        runs: One run for each folder: rows may share runs, since one run may hold several classifiers.
        files: Paths of the Markdown file, the CSV file and, if the table has one, the figure, and its values by round.
        causes: Why runs failed, by folder.
    """

    def __init__(self, name: str, table: Table, runs: Sequence[PlannedRun], out: Path) -> None:
        self._table, self._cells = table, runs
        self._rows = list(dict.fromkeys(run.row for run in runs))
        self._endings = {row.label: row.ending for row in (*table.rows, *table.beyond)}
        # The paper's numbers belong to its settings, or to its data whatever preset they were chosen by.
        self._columns: dict[str, str] = {
            run.column: run.column
            if isinstance(table.columns.get(run.column), Setting)
            else run.config["data"].get("name") or ""
            for run in runs
        }
        self.files = [out / f"{name}.md", out / f"{name}.csv"]
        if table.figure != "none":
            self.files.append(out / f"{name}.png")
        if table.quantities:
            self.files.append(out / f"{name}-rounds.csv")
        self.runs: dict[Path, PlannedRun] = {}
        for run in runs:
            self.runs.setdefault(run.folder.path, run)
        self.causes: dict[Path, str] = {}
        self._results: dict[Path, dict[str, Any]] = {}
        for path, run in self.runs.items():
            if not run.config["fresh"] and (result := self._read(run)):
                self._results[path] = result

    def missing(self) -> list[PlannedRun]:
        """Lists the runs that have no result."""
        return [run for path, run in self.runs.items() if path not in self._results]

    def to_attack(self) -> list[PlannedRun]:
        """Lists the complete runs that the table's attack has not been made on."""
        metric = self._table.metrics[0]
        return [
            run
            for path, run in self.runs.items()
            if self._table.attack and path in self._results and metric not in self._results[path]["last"]
        ]

    def add(self, run: PlannedRun, cause: str | None) -> None:
        """Takes in a run that has ended, and writes the files anew."""
        path = run.folder.path
        if cause:
            self.causes[path] = cause
        elif result := self._read(run):
            self._results[path] = result
        self.write()

    def _read(self, run: PlannedRun) -> dict[str, Any] | None:
        """Reads a run's result; one that cannot be read is the run's failure, not the table's."""
        try:
            result = run.folder.result()
            return with_attack(result, run.folder) if result and self._table.attack else result
        except UserError as error:
            self.causes[run.folder.path] = str(error)
            return None

    def write(self) -> None:
        """Writes the files with the results so far: an interruption loses no result."""
        frame, constants = self.frame(), self._constants()
        with atomic(self.files[0]) as part:
            part.write_text(markdown(self._table, self._rows, self._columns, frame, constants))
        with atomic(self.files[1]) as part:
            lines = frame if constants is None else pd.concat([frame, constants[1]])
            lines.map(csv_cell).to_csv(part, index=False)
        if self._table.figure != "none" and self._results:  # empty axes say nothing
            save_figure(self._figure(frame), self.files[2])

    def _figure(self, frame: pd.DataFrame) -> Figure:
        """Draws the table's figure; that over rounds also as a CSV file."""
        table, columns = self._table, list(self._columns)
        match table.figure:
            case "rows":
                return rows_figure(table, columns, frame)
            case "tasks":
                return tasks_figure(table, columns, frame)
            case "sheets":
                return sheets_figure(self._rows, columns, self._pictures())
        values = rounds_frame(table, self._outcomes())
        with atomic(self.files[3]) as part:
            values.map(csv_cell).to_csv(part, index=False)
        return rounds_figure(table, columns, values)

    def _pictures(self) -> dict[tuple[str, str], Path]:
        """Finds the picture of each row and column: that of the first seed which has one."""
        found: dict[tuple[str, str], Path] = {}
        for run in self._cells:
            file = run.folder.path / "figures" / f"{self._table.sheet}.png"
            if run.folder.path in self._results and file.is_file():
                found.setdefault((run.row, run.column), file)
        return found

    def frame(self) -> pd.DataFrame:
        """Builds a frame with one line for each row, column and seed."""
        return runs_frame(self._outcomes(), self._table.metrics)

    def _outcomes(self) -> list[Outcome]:
        return [
            Outcome(
                run.row,
                run.column,
                run.seed,
                str(run.folder.path),
                self._results.get(run.folder.path),
                self.causes.get(run.folder.path),
                self._endings[run.row],
            )
            for run in self._cells
        ]

    def _constants(self) -> tuple[Sequence[Row], pd.DataFrame] | None:
        # What chance gives stands beside an attack's numbers.
        return None if self._table.attack else constant_rows(self._outcomes(), self._table.metrics)

    def show(self, display: Display) -> None:
        """Prints the table: one table a column if all columns side by side are wider than the terminal."""
        frame = self.frame()
        rows = [row for row in (*self._table.rows, *self._table.beyond) if row.label in self._rows]
        shown, lines = rows, frame
        if (constants := self._constants()) is not None:
            shown, lines = [*rows, *constants[0]], pd.concat([frame, constants[1]])
        whole = results_table(self._table, shown, self._columns, lines)
        tables = [whole]
        width = markdown_table(list(whole.columns), whole.to_numpy().tolist()).index("\n")
        if width > shutil.get_terminal_size((120, 0)).columns:
            tables = [
                results_table(self._table, shown, {column: data}, lines)
                for column, data in self._columns.items()
            ]
        display.note("")
        display.note(self._table.title)
        for table in (*tables, costs_table(self._table, rows, frame)):
            display.table(cast("list[dict[str, str]]", table.to_dict("records")))
            display.note("")
        for line in caption(self._table, list(self._columns), frame):
            display.note(line)
        display.where_next(
            [*(("file", str(file)) for file in self.files if file.is_file()), ("compare", "mlflow ui")]
        )


def constant_rows(
    outcomes: Sequence[Outcome], metrics: Sequence[str]
) -> tuple[list[Row], pd.DataFrame] | None:
    """Lists the rows of a table's constant predictions, with their frame; None where no run classifies.

    Constant predictions depend on the partition and the test set alone. They are taken from the first complete run, of
    those with most clients: a row of the pooled data does not have the others' clients.
    """

    def clients(outcome: Outcome) -> int:
        return len((outcome.result or {})["partition"]["sizes"])

    found: dict[tuple[str, int], Outcome] = {}
    for outcome in outcomes:
        if outcome.result and outcome.result.get("constants"):
            place = (outcome.column, outcome.seed)
            known = found.setdefault(place, outcome)
            if clients(outcome) > clients(known):
                found[place] = outcome
    if not found:
        return None
    constants = [
        replace(outcome, row=label, ending="", constant=name)
        for name, label in CONSTANT_LABELS.items()
        for outcome in found.values()
    ]
    return [Row(label, ()) for label in CONSTANT_LABELS.values()], runs_frame(constants, metrics)
