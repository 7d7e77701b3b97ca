"""Fills the papers' tables with complete runs."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

import pandas as pd

from lit_fedad.core.config import Config, compose
from lit_fedad.core.errors import UserError
from lit_fedad.papers.plan import paper_columns, read_table
from lit_fedad.papers.results import attacked, constant_rows
from lit_fedad.papers.runs import CompleteRun, differences
from lit_fedad.report.tables import Outcome, Row, Setting, Table, runs_frame

SEEDS = (0, 1, 2)
"""Seeds of the runs of a paper's table."""


def missing(name: str, exact: Iterable[tuple[str, str, int]]) -> list[tuple[str, str]]:
    """Lists the commands for the runs that a paper's table lacks.

    Returns:
        Pairs of what is missing and the command that makes it. One command takes all data sets that lack the same
        rows and seeds.

    Raises:
        UserError: If there is no such table.
    """
    _, table = read_table(name)
    existing = set(exact)
    columns = paper_columns(table)
    data_by_lack: dict[tuple[tuple[str, ...], tuple[int, ...]], list[str]] = {}
    for data in dict.fromkeys(column.names[0] for column in columns):
        absent = [
            (row.label, seed)
            for row in table.rows
            for seed in SEEDS
            for column in columns
            if column.names[0] == data and (row.label, column.label, seed) not in existing
        ]
        if absent:
            rows, seeds = (tuple(dict.fromkeys(part)) for part in zip(*absent, strict=True))
            data_by_lack.setdefault((rows, tuple(sorted(seeds))), []).append(data)
    pairs = []
    for (rows, seeds), sets in data_by_lack.items():
        every = len(rows) == len(table.rows)
        options = [f"table={name}", *(f"root.{data}=DIR" for data in sets)]
        options += [] if every else [shlex.quote(f"rows={','.join(rows)}")]
        options += [] if seeds == SEEDS else [f"seeds={_numbers(seeds, ',')}"]
        what = (
            f"{'all rows' if every else ', '.join(rows)} on {', '.join(sets)}, seeds {_numbers(seeds, ', ')}"
        )
        pairs.append((f"{table.title} ({table.source}): {what}", f"lit-fedad report {' '.join(options)}"))
    return pairs


def _numbers(numbers: Iterable[int], separator: str) -> str:
    return separator.join(map(str, numbers))


@dataclass(frozen=True)
class FilledTable:
    """A paper's table with the complete runs that it lists.

    Attributes:
        table: The table; its rows are those that have runs, or at least numbers of the paper.
        columns: Key of the paper's numbers by label of a column that has runs.
        runs: Runs, one a seed, by labels of row and column.
    """

    name: str
    table: Table
    columns: Mapping[str, str]
    runs: Mapping[tuple[str, str], Sequence[CompleteRun]]

    @property
    def exact(self) -> set[tuple[str, str, int]]:
        """Row, column and seed of the runs."""
        return {(*cell, run.seed) for cell, runs in self.runs.items() for run in runs}

    def frame(self) -> pd.DataFrame:
        """Builds a frame with one line a run."""
        return runs_frame(self._outcomes(), self.table.metrics)

    def constants(self) -> tuple[Sequence[Row], pd.DataFrame] | None:
        """Lists the rows of constant predictions, with their frame; None where no run classifies."""
        return None if self.table.attack else constant_rows(self._outcomes(), self.table.metrics)

    def _outcomes(self) -> list[Outcome]:
        endings = {row.label: row.ending for row in (*self.table.rows, *self.table.beyond)}
        return [
            Outcome(row, column, run.seed, str(run.files), run.result, None, endings[row])
            for (row, column), runs in self.runs.items()
            for run in runs
        ]


def fill(name: str, runs: Sequence[CompleteRun]) -> FilledTable | None:
    """Fills a table of ``conf/table`` with the runs that it lists; None if there are none.

    Of several runs in one cell with one seed the last one counts.

    Raises:
        UserError: If there is no such table.
    """
    _, table = read_table(name)
    if table.attack:
        runs = [attacked(run) for run in runs]
    found: dict[tuple[str, str], dict[int, CompleteRun]] = {}
    for run in runs:
        for cell in _cells_of(table, run):
            found.setdefault(cell, {})[run.seed] = run
    if not found:
        return None
    with_runs = {row for row, _ in found}
    of_data = {
        # The paper's numbers belong to its settings, or to its data whatever the settings.
        label: label if isinstance(column, Setting) else column
        for label, column in table.columns.items()
    }
    columns = {label: of_data[label] for label in dict.fromkeys(column for _, column in found)}

    def shown(rows: Sequence[Row]) -> list[Row]:
        keys = columns.values()
        return [row for row in rows if row.label in with_runs or any(key in row.paper for key in keys)]

    return FilledTable(
        name,
        replace(table, rows=shown(table.rows), beyond=shown(table.beyond)),
        columns,
        {cell: [by_seed[seed] for seed in sorted(by_seed)] for cell, by_seed in found.items()},
    )


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
