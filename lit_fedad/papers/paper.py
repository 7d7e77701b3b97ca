"""Fills the papers' tables with complete runs."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import pandas as pd

from lit_fedad.papers.placing import (
    Place,
    column_overrides,
    comparable,
    composed,
    data_name,
    data_of,
    places_of,
)
from lit_fedad.papers.plan import read_table
from lit_fedad.papers.results import attacked, constant_rows
from lit_fedad.papers.runs import CompleteRun, differences, shortened
from lit_fedad.report.tables import Outcome, Row, Setting, Table, runs_frame

SEEDS = (0, 1, 2)
"""Seeds of the runs of a paper's table."""


def missing(name: str, exact: Iterable[tuple[str, str, int]]) -> list[tuple[str, str]]:
    """Lists the commands for the runs that a paper's table lacks.

    Args:
        name: Name of the table.
        exact: Row, column and seed of the runs that it has.

    Returns:
        Pairs of what is missing and the command that makes it. One command takes all data sets that lack the same
        rows and seeds.

    Raises:
        UserError: If there is no such table.
    """
    _, table = read_table(name)
    existing = set(exact)
    data_by_lack: dict[tuple[tuple[str, ...], tuple[int, ...]], list[str]] = {}
    for data in dict.fromkeys(map(data_of, table.columns.values())):
        absent = [
            (row.label, seed)
            for row in table.rows
            for seed in SEEDS
            for label, column in table.columns.items()
            if data_of(column) == data and (row.label, label, seed) not in existing
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


def missing_beside(name: str, table: Table, columns: Mapping[str, Sequence[Place]]) -> list[tuple[str, str]]:
    """Lists the commands for rows and seeds that columns beside the paper's lack.

    Args:
        name: Name of the table.
        table: The table.
        columns: Runs by label of a column that the paper does not have.

    Returns:
        Pairs of what is missing and the command that makes it; nothing for a column that no command makes.
    """
    pairs = []
    for column, places in columns.items():
        one = places[0]
        options = [*one.column_differs.values(), *column_overrides(table, one.run)]
        remade = composed((*options, *one.row.overrides), one.run)
        if differences(one.run.config, remade).keys() != one.row_differs.keys():
            continue
        seeds = sorted({place.run.seed for place in places})
        existing = {(place.row.label, place.run.seed) for place in places if not place.row_differs}
        absent = [
            (row.label, seed) for row in table.rows for seed in seeds if (row.label, seed) not in existing
        ]
        if absent:
            rows, lacking = (list(dict.fromkeys(part)) for part in zip(*absent, strict=True))
            options += [f"rows={','.join(rows)}", f"seeds={_numbers(sorted(lacking), ',')}"]
            what = f"{table.title}, {column}: {', '.join(rows)}, seeds {_numbers(sorted(lacking), ', ')}"
            pairs.append((what, shlex.join(["lit-fedad", "report", f"table={name}", *options])))
    return pairs


def _numbers(numbers: Iterable[int], separator: str) -> str:
    return separator.join(map(str, numbers))


_MOST_OVERRIDES = 16  # that a note names


@dataclass(frozen=True)
class FilledTable:
    """A paper's table with the complete runs that belong to it.

    Attributes:
        name: Name of the table.
        table: The table; its rows include those that differ from the paper's.
        columns: Key of the paper's numbers by label of a column.
        runs: Runs, one a seed, by labels of row and column.
        notes: How rows and columns differ from the paper's.
        exact: Row, column and seed of the runs that the table itself lists.
        missing_beside: Pairs of what columns beside the paper's lack, and the command that makes it.
    """

    name: str
    table: Table
    columns: Mapping[str, str]
    runs: Mapping[tuple[str, str], Sequence[CompleteRun]]
    notes: Sequence[str]
    exact: frozenset[tuple[str, str, int]]
    missing_beside: Sequence[tuple[str, str]]

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
    """Fills a table with the runs that belong to it.

    Data that the paper does not have get a column where two rows can be compared, one of them of the paper's method.

    Args:
        name: Name of a table of ``conf/table``.
        runs: In the order in which they began: of several runs at one place and seed the last one counts.

    Returns:
        The table; None if no run belongs to it.

    Raises:
        UserError: If there is no such table.
    """
    _, table = read_table(name)
    if table.attack:
        runs = [attacked(run) for run in runs]
    places = [place for run in runs for place in places_of(table, run)]
    labels = _Labels(table)
    found: dict[tuple[str, str], dict[int, CompleteRun]] = {}
    beside: dict[str, list[Place]] = {}
    for place in places:
        if place.column is None and not comparable(name, place, places):
            continue
        row, column = labels.row(place), labels.column(place)
        found.setdefault((row, column), {})[place.run.seed] = place.run
        if place.column is None:
            beside.setdefault(column, []).append(place)
    if not found:
        return None
    with_runs = {row for row, _ in found}
    keys = {labels.columns[column] for _, column in found}
    return FilledTable(
        name,
        replace(
            table,
            rows=labels.rows(table.rows, with_runs, keys),
            beyond=labels.rows(table.beyond, with_runs, keys),
        ),
        {label: labels.columns[label] for label in dict.fromkeys(column for _, column in found)},
        {key: [by_seed[seed] for seed in sorted(by_seed)] for key, by_seed in found.items()},
        labels.notes,
        frozenset((p.row.label, p.column, p.run.seed) for p in places if p.exact and p.column),
        missing_beside(name, table, beside),
    )


class _Labels:
    """Labels of rows and columns; those that differ from the paper's get a mark, which a note explains."""

    def __init__(self, table: Table) -> None:
        self.table = table
        self.notes: list[str] = []
        self.columns: dict[str, str] = {}
        self._marks: dict[tuple[str, str], str] = {}
        self._variants: dict[str, list[str]] = {}

    def row(self, place: Place) -> str:
        """Labels the row of a place."""
        label = self._marked(place.row.label, place.row_differs)
        if label != place.row.label and label not in self._variants.get(place.row.label, ()):
            self._variants.setdefault(place.row.label, []).append(label)
        return label

    def column(self, place: Place) -> str:
        """Labels the column of a place."""
        name = place.column or place.run.result["data"]
        label = self._marked(name, place.column_differs)
        # The paper's numbers belong to its settings, or to its data whatever the settings.
        setting = isinstance(self.table.columns.get(name), Setting)
        self.columns[label] = name if setting else data_name(place.run.config)
        return label

    def rows(self, rows: Sequence[Row], with_runs: set[str], columns: set[str]) -> list[Row]:
        """Lists rows and their variants that have runs, or at least numbers of the paper."""
        shown = []
        for row in rows:
            labels = [row.label, *self._variants.get(row.label, ())]
            kept = [label for label in labels if label in with_runs]
            if not kept and not columns.isdisjoint(row.paper):
                kept = [row.label]
            shown += [replace(row, label=label) for label in kept]
        return shown

    def _marked(self, label: str, differs: Mapping[str, str]) -> str:
        if not differs:
            return label
        overrides = ", ".join(differs.values())
        if (label, overrides) not in self._marks:
            mark = chr(ord("a") + len(self._marks)) if len(self._marks) < 26 else f"a{len(self._marks)}"
            self._marks[label, overrides] = mark
            self.notes.append(f"({mark}) {label} with {shortened(list(differs.values()), _MOST_OVERRIDES)}.")
        return f"{label} ({self._marks[label, overrides]})"
