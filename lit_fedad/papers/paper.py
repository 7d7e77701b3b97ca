"""The papers' tables filled with runs: those that MLflow lists, or those that a table asks for."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from lit_fedad.audits.membership import LiraOptions
from lit_fedad.core.config import Config, compose
from lit_fedad.core.errors import UserError
from lit_fedad.core.files import atomic
from lit_fedad.core.text import csv_cell
from lit_fedad.experiment.run_files import refused_if_malformed
from lit_fedad.experiment.run_folder import RunFolder
from lit_fedad.papers.plan import PlannedRun, paper_columns, read_table
from lit_fedad.papers.runs import CompleteRun, Links, differences
from lit_fedad.report.closing import CONSTANT_LABELS
from lit_fedad.report.console import Display
from lit_fedad.report.figures import save_figure
from lit_fedad.report.html import Grid, Page, Section, render_markdown
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
    costs_grid,
    results_grid,
    runs_frame,
)
from lit_fedad.tracking.sender import where_compared


@dataclass(frozen=True)
class FilledTable:
    """A paper's table with runs in its cells.

    Attributes:
        table: The table; its rows are those that are shown.
        columns: Key of the paper's numbers by label of a column that is shown.
        outcomes: The runs, complete or not.
        complete: Complete runs, one a seed, by labels of row and column, which numbers link to.
    """

    name: str
    table: Table
    columns: Mapping[str, str]
    outcomes: Sequence[Outcome]
    complete: Mapping[tuple[str, str], Sequence[CompleteRun]] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        name: str,
        table: Table,
        outcomes: Sequence[tuple[Outcome, Config]],
        rows: Collection[str] = (),
        complete: Mapping[tuple[str, str], Sequence[CompleteRun]] = MappingProxyType({}),
    ) -> FilledTable:
        """Puts runs into the cells of a table.

        Args:
            name: The table's name.
            table: The table, with all of its rows.
            outcomes: The runs with their configurations; each gets the ending of its row's metrics.
            rows: Labels of the rows to show; empty for those that have runs, or numbers of the paper for their data.
            complete: As in `FilledTable`.
        """
        # The paper's numbers belong to its settings, or to its data whatever preset they were chosen by.
        columns = {
            outcome.column: outcome.column
            if isinstance(table.columns.get(outcome.column), Setting)
            else config["data"].get("name") or ""
            for outcome, config in outcomes
        }
        all_rows = (*table.rows, *table.beyond)
        endings = {row.label: row.ending for row in all_rows}
        shown = {*rows} or {outcome.row for outcome, _ in outcomes} | {
            row.label for row in all_rows if any(key in row.paper for key in columns.values())
        }
        listed, beyond = ([row for row in part if row.label in shown] for part in (table.rows, table.beyond))
        runs = [replace(outcome, ending=endings[outcome.row]) for outcome, _ in outcomes]
        return cls(name, replace(table, rows=listed, beyond=beyond), columns, runs, complete)

    @cached_property
    def frame(self) -> pd.DataFrame:
        """The frame with one line a run."""
        return runs_frame(self.outcomes, self.table.metrics)

    @cached_property
    def constants(self) -> tuple[Sequence[Row], pd.DataFrame] | None:
        """Rows of constant predictions, with their frame; None where no run classifies, or runs are attacked.

        In a table of attacks, what the same attack finds by chance stands in their place.
        """
        return None if self.table.attack else constant_rows(self.outcomes, self.table.metrics)

    def grids(self, links: Links | None = None) -> Iterator[Grid]:
        """Tabulates results beside the paper's, and what they cost: the paper's rows, those beyond, and constants."""

        def link(row: str, column: str | None) -> str | None:
            runs = [
                run
                for cell, shown in self.complete.items()
                if cell == (row, column or cell[1])
                for run in shown
            ]
            return links.runs(runs) if links else None

        table, with_runs = self.table, set(self.frame["row"])
        blocks = [(table.title, table.rows), (f"{table.title}: beyond the paper", table.beyond)]
        blocks = [(title, rows) for title, rows in blocks if with_runs & {row.label for row in rows}]
        for title, rows in blocks:
            yield results_grid(table, rows, self.columns, self.frame, link, title)
            shown = [row for row in rows if row.label in with_runs]
            costs = costs_grid(table, shown, self.frame, link, f"{title}: what it cost")
            last = rows is blocks[-1][1]
            yield replace(costs, notes=caption(table, list(self.columns), self.frame)) if last else costs
        if self.constants:
            title = f"{table.title}: predictions that look at no image"
            yield results_grid(table, self.constants[0], self.columns, self.constants[1], link, title)


def constant_rows(
    outcomes: Sequence[Outcome], metrics: Sequence[str]
) -> tuple[list[Row], pd.DataFrame] | None:
    """Lists the rows of a table's constant predictions, with their frame; None where no run classifies.

    Constant predictions depend on the partition and the test set alone. They are taken from the first complete run, of
    those with most clients, because a row of pooled data does not have the clients of other rows.
    """
    first: dict[tuple[str, int], Outcome] = {}
    with_constants = [run for run in outcomes if run.result and run.result.get("constants")]
    for outcome in sorted(with_constants, key=lambda run: -len((run.result or {})["partition"]["sizes"])):
        first.setdefault((outcome.column, outcome.seed), outcome)
    if not first:
        return None
    constants = [
        replace(outcome, row=label, ending="", constant=name)
        for name, label in CONSTANT_LABELS.items()
        for outcome in first.values()
    ]
    return [Row(label, ()) for label in CONSTANT_LABELS.values()], runs_frame(constants, metrics)


def with_attack(result: Mapping[str, Any], folder: RunFolder, attack: Sequence[str] = ()) -> dict[str, Any]:
    """Adds what membership inference found to a run's last round.

    Args:
        result: Content of the run's ``result.json``.
        folder: The run's folder.
        attack: Options of the table's attack; results of an attack with other options are left out.

    Raises:
        UserError: If the attack's file cannot be read.
    """
    # Earlier versions could compare training with test images too, and wrote which they compared.
    options = {
        "non_members": "train",
        **asdict(LiraOptions()),
        **dict(option.split("=", 1) for option in attack),
    }
    content = folder.attack("lira") or {}
    if any(str(content.get(key, value)) != str(value) for key, value in options.items() if key != "out"):
        content = {}
    numbers = {name: {"mean": value} for name, value in content.items() if isinstance(value, float)}
    return {**result, "last": {**result["last"], **numbers}}


def fill(name: str, runs: Sequence[CompleteRun]) -> FilledTable | None:
    """Fills a table of ``conf/table`` with the runs that it lists; None if there are none.

    Of several runs in one cell with one seed the last one counts.

    Raises:
        UserError: If there is no such table.
    """
    table = read_table(name)
    if table.attack:
        runs = [_attacked(run, table.attack) for run in runs]
    runs_by_cell: dict[tuple[str, str], dict[int, CompleteRun]] = {}
    for run in runs:
        for cell in _cells_of(table, run):
            runs_by_cell.setdefault(cell, {})[run.seed] = run
    if not runs_by_cell:
        return None
    complete = {cell: [by_seed[seed] for seed in sorted(by_seed)] for cell, by_seed in runs_by_cell.items()}
    outcomes = [
        (Outcome(row, column, run.seed, str(run.files), run.result), run.config)
        for (row, column), cells in complete.items()
        for run in cells
    ]
    return FilledTable.of(name, table, outcomes, complete=complete)


def _attacked(run: CompleteRun, attack: Sequence[str]) -> CompleteRun:
    """Adds what the attack found; a file that cannot be read is named in the page's section about attacks."""
    with suppress(UserError):
        return replace(run, result=with_attack(run.result, RunFolder(run.files), attack))
    return run


def _cells_of(table: Table, run: CompleteRun) -> Iterator[tuple[str, str]]:
    """Yields row and column of the cells that a run belongs to: several if it holds several classifiers."""
    config = run.config
    data = config["data"].get("name") or config["data"]["_target_"].rpartition(".")[2]
    needs_root = "root" in config["data"]
    for column in paper_columns(table):
        for row in (*table.rows, *table.beyond) if column.names[0] == data else ():
            if (
                f"method={config['method']['name']}" in row.overrides
                and run.mean(f"{table.metrics[0]}{row.ending}") is not None
                and not differences(config, _composed((*column.overrides, *row.overrides), needs_root))
            ):
                yield row.label, column.label


@cache
def _composed(overrides: tuple[str, ...], needs_root: bool) -> Config:
    """Composes a cell's configuration; empty where its overrides do not go with the data."""
    try:
        return compose([*overrides, *(["data.root=DIR"] if needs_root else [])])
    except UserError:
        return {}


def write_table(page: Page, frame: pd.DataFrame, markdown: Path, csv: Path) -> None:
    """Writes a table as Markdown, and its frame as CSV, each completely or not at all."""
    with atomic(markdown) as partial:
        partial.write_text(render_markdown(page, "")[0])
    with atomic(csv) as partial:
        frame.map(csv_cell).to_csv(partial, index=False)


class TableResults:
    """A table with the results of its runs so far.

    Attributes:
        runs: One run for each folder: rows may share runs, since one run may hold several classifiers.
        files: Paths of the Markdown file, the CSV file and, if the table has one, the figure, and its values by round.
        causes: Why runs failed, by folder.
    """

    def __init__(self, name: str, table: Table, runs: Sequence[PlannedRun], out: Path) -> None:
        self.name, self._table, self._cells = name, table, runs
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
            self.causes.pop(path, None)  # of what was there before
        self.write()

    def _read(self, run: PlannedRun) -> dict[str, Any] | None:
        """Reads a run's result; one that cannot be read is the run's failure, not the table's."""
        path, table = run.folder.path, self._table
        try:
            result = run.folder.result()
            if result is None:
                return None
            with refused_if_malformed(str(path / "result.json")):
                if table.attack:
                    result = with_attack(result, run.folder, table.attack)
                one = [Outcome(run.row, run.column, run.seed, str(path), result)]
                runs_frame(one, table.metrics)
                if not table.attack:
                    constant_rows(one, table.metrics)
                if table.quantities:
                    rounds_frame(table, one)
            return result
        except UserError as error:
            self.causes[path] = str(error)
            return None

    @property
    def filled(self) -> FilledTable:
        """The table with the results so far."""
        outcomes = []
        for run in self._cells:
            path = run.folder.path
            result, cause = self._results.get(path), self.causes.get(path)
            outcomes.append((Outcome(run.row, run.column, run.seed, str(path), result, cause), run.config))
        return FilledTable.of(self.name, self._table, outcomes, {run.row for run in self._cells})

    def write(self) -> None:
        """Writes the files with the results so far: an interruption loses no result."""
        filled = self.filled
        frames = [filled.frame, *([filled.constants[1]] if filled.constants else [])]
        page = Page(self._table.title, "", [Section("Results", list(filled.grids()))])
        write_table(page, pd.concat(frames), *self.files[:2])
        if self._table.figure != "none" and self._results:  # empty axes say nothing
            save_figure(self._figure(filled), self.files[2])

    def _figure(self, filled: FilledTable) -> Figure:
        """Draws the table's figure; that over rounds also as a CSV file."""
        table, columns, frame = filled.table, list(filled.columns), filled.frame
        match table.figure:
            case "rows":
                return rows_figure(table, columns, frame)
            case "tasks":
                return tasks_figure(table, columns, frame)
            case "sheets":
                return sheets_figure(
                    [row.label for row in (*table.rows, *table.beyond)], columns, self._pictures()
                )
        values = rounds_frame(table, filled.outcomes)
        with atomic(self.files[3]) as partial:
            values.map(csv_cell).to_csv(partial, index=False)
        return rounds_figure(table, columns, values)

    def _pictures(self) -> dict[tuple[str, str], Path]:
        """Finds the picture of each row and column: that of the first seed which has one."""
        files: dict[tuple[str, str], Path] = {}
        for run in self._cells:
            file = run.folder.path / "figures" / f"{self._table.sheet}.png"
            if run.folder.path in self._results and file.is_file():
                files.setdefault((run.row, run.column), file)
        return files

    def unmeasured(self) -> list[str]:
        """Lists the table's metrics that no complete run knows, in any row."""
        known = {name for result in self._results.values() for name in result["last"]}
        endings = {row.ending for row in (*self._table.rows, *self._table.beyond)}
        return [
            metric
            for metric in self._table.metrics
            if known and not known & {f"{metric}{ending}" for ending in endings}
        ]

    def show(self, display: Display) -> None:
        """Prints the table."""
        display.blocks(self.filled.grids())
        written = [("file", str(file)) for file in self.files if file.is_file()]
        display.where_next([*written, *where_compared(run.folder.path for run in self._cells)])
