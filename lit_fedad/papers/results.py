"""A paper's table so far, of runs or of declared forms, and the files that show it."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from lit_fedad.contracts import Free, MessageSpec, TensorSpec
from lit_fedad.core.config import Config, compose
from lit_fedad.core.errors import UserError
from lit_fedad.core.files import atomic
from lit_fedad.core.text import csv_cell
from lit_fedad.experiment.build import Model, build_model
from lit_fedad.methods.parts.condensed_images import IMAGES
from lit_fedad.papers.paper import FilledTable, with_attack
from lit_fedad.papers.plan import Column, PlannedRun
from lit_fedad.report.console import Display
from lit_fedad.report.figures import save_figure
from lit_fedad.report.html import Grid, Line, Page, Section, render_markdown
from lit_fedad.report.table_figures import (
    rounds_figure,
    rounds_frame,
    rows_figure,
    sheets_figure,
    tasks_figure,
)
from lit_fedad.report.tables import UNKNOWN, Outcome, Row, Setting, Table
from lit_fedad.tracking.sender import where_compared


def write_table(page: Page, frame: pd.DataFrame, markdown: Path, csv: Path) -> None:
    """Writes a table as Markdown, and its frame as CSV, each completely or not at all."""
    with atomic(markdown) as part:
        part.write_text(render_markdown(page, "")[0])
    with atomic(csv) as part:
        frame.map(csv_cell).to_csv(part, index=False)


class TableResults:
    """A table with the results of its runs so far.

    Attributes:
        runs: One run for each folder: rows may share runs, since one run may hold several classifiers.
        files: Paths of the Markdown file, the CSV file and, if the table has one, the figure, and its values by round.
        causes: Why runs failed, by folder.
    """

    def __init__(self, name: str, table: Table, runs: Sequence[PlannedRun], out: Path) -> None:
        chosen = {run.row for run in runs}
        rows, beyond = ([row for row in part if row.label in chosen] for part in (table.rows, table.beyond))
        self.name, self._table, self._cells = name, replace(table, rows=rows, beyond=beyond), runs
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

    @property
    def filled(self) -> FilledTable:
        """The table with the results so far."""
        return FilledTable(self.name, self._table, self._columns, self._outcomes())

    def write(self) -> None:
        """Writes the files with the results so far: an interruption loses no result."""
        filled = self.filled
        frames = [filled.frame, *([filled.constants[1]] if filled.constants else [])]
        page = Page(self._table.title, "", [Section("Results", list(filled.grids()))])
        write_table(page, pd.concat(frames), *self.files[:2])
        if self._table.figure != "none" and self._results:  # empty axes say nothing
            save_figure(self._figure(filled.frame), self.files[2])

    def _figure(self, frame: pd.DataFrame) -> Figure:
        """Draws the table's figure; that over rounds also as a CSV file."""
        table, columns = self._table, list(self._columns)
        match table.figure:
            case "rows":
                return rows_figure(table, columns, frame)
            case "tasks":
                return tasks_figure(table, columns, frame)
            case "sheets":
                return sheets_figure(
                    [r.label for r in (*table.rows, *table.beyond)], columns, self._pictures()
                )
        values = rounds_frame(table, self._outcomes())
        with atomic(self.files[3]) as part:
            values.map(csv_cell).to_csv(part, index=False)
        return rounds_figure(table, columns, values)

    def _pictures(self) -> dict[tuple[str, str], Path]:
        """Finds the picture of each row and column: that of the first seed which has one."""
        files: dict[tuple[str, str], Path] = {}
        for run in self._cells:
            file = run.folder.path / "figures" / f"{self._table.sheet}.png"
            if run.folder.path in self._results and file.is_file():
                files.setdefault((run.row, run.column), file)
        return files

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

    def show(self, display: Display) -> None:
        """Prints the table."""
        display.blocks(self.filled.grids())
        display.where_next(
            [
                *(("file", str(file)) for file in self.files if file.is_file()),
                *where_compared(run.folder.path for run in self._cells),
            ]
        )


_MIB = 1024**2


def upload_mib(config: Config, setting: Setting) -> float:
    """Computes the size of what all clients send in a round, in MiB, without headers (FedVCK, Table 5).

    Condensed images are `share` times the training images; that each class of a client has a fewest number of them,
    and is rounded up, is not counted. Lists of classes are counted as if each client had all.

    Raises:
        UserError: If the sender chooses another size, which only a run can tell.
    """
    model, clients = _model(config, setting), config["partition"]["clients"]
    image = config["image"]
    share = config["method"]["client"].get("share", 0.0)
    sizes = {
        IMAGES: share * setting.images / clients,
        "classes": setting.classes,
        "channels": image["channels"],
        "height": image["size"],
        "width": image["size"],
    }
    tensors = chain.from_iterable(
        exchange.upload_spec(model.client).items() for exchange in model.method.exchanges.rounds
    )
    of_client = sum(_bytes(name, tensor, sizes, config["method"]["name"]) for name, tensor in tensors)
    return clients * of_client / _MIB


def messages(config: Config, setting: Setting) -> dict[str, str]:
    """Lists what crosses before round 1 and in a round, each way (FedVCK, Table 10)."""
    model = _model(config, setting)
    contents = {}
    for when, exchanges in (
        ("before round 1", model.method.exchanges.setup),
        ("a round", model.method.exchanges.rounds),
    ):
        for way in ("up", "down"):
            specs = [
                exchange.upload_spec(model.client) if way == "up" else exchange.broadcast_spec(model.client)
                for exchange in exchanges
            ]
            contents[f"{way}, {when}"] = ", ".join(_contents(specs, model)) or "-"
    return contents


def _model(config: Config, setting: Setting) -> Model:
    return build_model(config, [str(number) for number in range(setting.classes)])


def _bytes(name: str, tensor: TensorSpec, sizes: Mapping[str, float], method: str) -> float:
    lengths = []
    for size in tensor.shape:
        if isinstance(size, Free) and size.name not in sizes:
            raise UserError(f"method={method}: only a run can tell how many {size.name} of '{name}' are sent")
        lengths.append(sizes[size.name] if isinstance(size, Free) else size)
    return math.prod(lengths) * tensor.dtype.itemsize


def _contents(specs: Iterable[MessageSpec], model: Model) -> list[str]:
    """Names what messages hold; tensors of a module by the module's name."""
    weights = {name for name, _ in chain(model.task.named_parameters(), model.task.named_buffers())}
    names = ["weights" if name in weights else name.partition(".")[0] for spec in specs for name in spec]
    return list(dict.fromkeys(names))


_CAPTIONS = {
    "upload": "MiB that all clients send in a training round, by the declared forms of messages, without headers.",
    "messages": "Tensors by the declared forms of messages; weights are those of the task, with their buffers.",
}


def report_forms(
    name: str,
    table: Table,
    rows: Sequence[Row],
    columns: Sequence[Column],
    common: Sequence[str],
    out: Path,
    display: Display,
) -> list[Path]:
    """Writes a table of declared forms as Markdown and CSV, and prints it.

    Raises:
        UserError: For overrides that cannot be composed, naming row and column.
    """
    cells = [
        {k: v for column in columns for k, v in _cells(table, row, column, common).items()} for row in rows
    ]
    lines = [Line.of([row.label, *values.values()]) for row, values in zip(rows, cells, strict=True)]
    notes = [f"The paper's: {table.source}.", _CAPTIONS[table.cells], " ".join(table.note.split())]
    grid = Grid("", [table.rows_are, *cells[0]], lines, list(filter(None, notes)))
    files = [out / f"{name}.md", out / f"{name}.csv"]
    frame = pd.DataFrame([[cell.text for cell in line.cells] for line in lines], columns=list(grid.heads))
    write_table(Page(table.title, "", [Section("Declared forms", [grid])]), frame, *files)
    display.note(table.title)
    display.blocks([grid])
    display.where_next([("file", str(file)) for file in files])
    return files


def _cells(table: Table, row: Row, column: Column, common: Sequence[str]) -> dict[str, str]:
    """Returns the texts of a row's cells in a column, by heading."""
    setting = table.columns[column.label]
    assert isinstance(setting, Setting)  # tested of all tables of declared forms
    try:
        config = compose(["data.root=DIR", *common, *column.overrides, *row.overrides])
        if table.cells == "messages":
            return messages(config, setting)
        cells = {column.label: f"{upload_mib(config, setting):.2f}"}
    except UserError as error:
        raise UserError(f"row {row.label}, column {column.label}: {error}") from error
    printed = row.paper.get(column.label)
    return {**cells, f"{column.label}, paper": f"{printed[0]:.2f}" if printed else UNKNOWN}
