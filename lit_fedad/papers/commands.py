"""Commands that make the runs which the papers' tables lack."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence

from lit_fedad.papers.placing import Place, column_overrides, composed, data_of
from lit_fedad.papers.plan import read_table
from lit_fedad.papers.runs import differences
from lit_fedad.report.tables import Table

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
