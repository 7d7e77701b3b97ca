"""The papers' tables with runs in their cells."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import Any

import pandas as pd

from lit_fedad.core.config import Config, compose
from lit_fedad.core.errors import UserError
from lit_fedad.experiment.run_folder import RunFolder
from lit_fedad.papers.plan import paper_columns, read_table
from lit_fedad.papers.runs import CompleteRun, Links, differences
from lit_fedad.report.closing import CONSTANT_LABELS
from lit_fedad.report.html import Grid
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

    @cached_property
    def frame(self) -> pd.DataFrame:
        """The frame with one line a run."""
        return runs_frame(self.outcomes, self.table.metrics)

    @cached_property
    def constants(self) -> tuple[Sequence[Row], pd.DataFrame] | None:
        """Rows of constant predictions, with their frame; None where no run classifies, or runs are attacked.

        What chance gives stands beside an attack's numbers.
        """
        return None if self.table.attack else constant_rows(self.outcomes, self.table.metrics)

    def grids(self, links: Links | None = None) -> Iterator[Grid]:
        """Tabulates results beside the paper's, and what they cost: the paper's rows, those beyond, and constants."""

        def link(row: str, column: str | None) -> str | None:
            runs = [
                r for cell, shown in self.complete.items() if cell == (row, column or cell[1]) for r in shown
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
    those with most clients: a row of the pooled data does not have the others' clients.
    """
    first: dict[tuple[str, int], Outcome] = {}
    judged = [one for one in outcomes if one.result and one.result.get("constants")]
    for outcome in sorted(judged, key=lambda one: -len((one.result or {})["partition"]["sizes"])):
        first.setdefault((outcome.column, outcome.seed), outcome)
    if not first:
        return None
    constants = [
        replace(outcome, row=label, ending="", constant=name)
        for name, label in CONSTANT_LABELS.items()
        for outcome in first.values()
    ]
    return [Row(label, ()) for label in CONSTANT_LABELS.values()], runs_frame(constants, metrics)


def with_attack(result: Mapping[str, Any], folder: RunFolder) -> dict[str, Any]:
    """Adds what membership inference found to a run's last round.

    Raises:
        UserError: If the attack's file cannot be read.
    """
    content = folder.attacks().get("lira", {})
    numbers = {name: {"mean": value} for name, value in content.items() if isinstance(value, float)}
    return {**result, "last": {**result["last"], **numbers}}


def fill(name: str, runs: Sequence[CompleteRun]) -> FilledTable | None:
    """Fills a table of ``conf/table`` with the runs that it lists; None if there are none.

    Of several runs in one cell with one seed the last one counts.

    Raises:
        UserError: If there is no such table.
    """
    _, table = read_table(name)
    if table.attack:
        runs = [replace(run, result=with_attack(run.result, RunFolder(run.files))) for run in runs]
    runs_by_cell: dict[tuple[str, str], dict[int, CompleteRun]] = {}
    for run in runs:
        for cell in _cells_of(table, run):
            runs_by_cell.setdefault(cell, {})[run.seed] = run
    if not runs_by_cell:
        return None
    with_runs = {row for row, _ in runs_by_cell}
    of_data = {
        # The paper's numbers belong to its settings, or to its data whatever the settings.
        label: label if isinstance(column, Setting) else column
        for label, column in table.columns.items()
    }
    columns = {label: of_data[label] for label in dict.fromkeys(column for _, column in runs_by_cell)}

    def shown(rows: Sequence[Row]) -> list[Row]:
        keys = columns.values()
        return [row for row in rows if row.label in with_runs or any(key in row.paper for key in keys)]

    complete = {cell: [by_seed[seed] for seed in sorted(by_seed)] for cell, by_seed in runs_by_cell.items()}
    endings = {row.label: row.ending for row in (*table.rows, *table.beyond)}
    outcomes = [
        Outcome(row, column, run.seed, str(run.files), run.result, None, endings[row])
        for (row, column), cells in complete.items()
        for run in cells
    ]
    table = replace(table, rows=shown(table.rows), beyond=shown(table.beyond))
    return FilledTable(name, table, columns, outcomes, complete)


def _cells_of(table: Table, run: CompleteRun) -> Iterator[tuple[str, str]]:
    """Yields row and column of the cells that a run is one of: several if it holds several classifiers."""
    config = run.config
    data = config["data"].get("name") or config["data"]["_target_"].rpartition(".")[2]
    for column in paper_columns(table):
        for row in (*table.rows, *table.beyond) if column.names[0] == data else ():
            if (
                f"method={config['method']['name']}" in row.overrides
                and run.mean(f"{table.metrics[0]}{row.ending}") is not None
                and not differences(
                    config, _composed((*column.overrides, *row.overrides), "root" in config["data"])
                )
            ):
                yield row.label, column.label


@cache
def _composed(overrides: tuple[str, ...], needs_root: bool) -> Config:
    """Composes a cell's configuration; empty where its overrides do not go with the data."""
    try:
        return compose([*overrides, *(["data.root=DIR"] if needs_root else [])])
    except UserError:
        return {}
