"""Sections of the report: the papers' tables beside our runs, and the commands for the runs that they lack."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from lit_fedad.comparison.commands import missing
from lit_fedad.comparison.links import Links
from lit_fedad.comparison.paper import FilledTable
from lit_fedad.comparison.runs import CompleteRun
from lit_fedad.report.html import Block, Cell, Commands, Grid, Line, Prose
from lit_fedad.report.naming import metric_title
from lit_fedad.report.table_markdown import caption
from lit_fedad.report.tables import costs_table, results_table


def paper_tables(tables: Sequence[FilledTable], links: Links) -> Iterator[Block]:
    """Tabulates each paper's numbers beside those of our runs, and what our runs cost.

    Args:
        tables: Tables that have at least one run.
        links: Addresses of the runs.

    Yields:
        For the rows of each paper, and for rows beyond it: a table of results and one of costs.
    """
    for table in tables:
        yield from _paper_table(table, links)


def missing_runs(names: Sequence[str], tables: Sequence[FilledTable]) -> Iterator[Block]:
    """Lists the commands for all runs that tables lack.

    Args:
        names: Names of all tables.
        tables: Those that have at least one run.

    Yields:
        A line of explanation and the commands, if a run is missing.
    """
    exact = {table.name: table.exact for table in tables}
    pairs = [pair for table in tables for pair in table.missing_beside]
    for name in names:
        pairs += missing(name, exact.get(name, ()))
    if pairs:
        yield Prose(
            [
                "DIR stands for the folder of the data. A command runs what is missing and resumes what was begun."
            ]
        )
        yield Commands(pairs)


def _paper_table(filled: FilledTable, links: Links) -> Iterator[Block]:
    table, frame = filled.table, filled.frame()
    column_of = {
        column if len(table.metrics) == 1 else f"{column} {metric_title(metric)}": column
        for column in filled.columns
        for metric in table.metrics
    }
    notes = [
        f"The paper's numbers: {table.source}.",
        *caption(table, list(filled.columns), frame),
        *filled.notes,
        " ".join(table.note.split()),
    ]
    with_runs = {row for row, _ in filled.runs}
    blocks = [(table.title, list(table.rows)), (f"{table.title}: beyond the paper", list(table.beyond))]
    blocks = [(title, rows) for title, rows in blocks if with_runs & {row.label for row in rows}]
    for title, rows in blocks:
        texts = results_table(table, rows, filled.columns, frame)
        lines = [
            Line(
                [
                    Cell(text, links.runs(filled.runs.get((row.label, column_of.get(head, "")), ())))
                    for head, text in zip(texts.columns, line, strict=True)
                ]
            )
            for row, line in zip(rows, texts.to_numpy().tolist(), strict=True)
        ]
        yield Grid(title, list(texts.columns), lines)
        costs = costs_table(table, [row for row in rows if row.label in with_runs], frame)
        yield Grid(
            f"{title}: what it cost",
            list(costs.columns),
            [
                Line([Cell(text, links.runs(_runs_of_row(filled, line[0]))) for text in line])
                for line in costs.to_numpy().tolist()
            ],
            [note for note in notes if note] if rows is blocks[-1][1] else (),
        )

    if (constants := filled.constants()) is not None:
        texts = results_table(table, constants[0], filled.columns, constants[1])
        yield Grid(
            f"{table.title}: predictions that look at no image",
            list(texts.columns),
            [Line([Cell(text) for text in line]) for line in texts.to_numpy().tolist()],
        )


def _runs_of_row(filled: FilledTable, row: str) -> list[CompleteRun]:
    return [run for (label, _), runs in filled.runs.items() if label == row for run in runs]
