"""Reports a paper's table of declared forms: at once, since it consists of no runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from lit_fedad.comparison.forms import messages, upload_mib
from lit_fedad.comparison.plan import Column
from lit_fedad.config import compose
from lit_fedad.errors import UserError
from lit_fedad.guards.text import csv_cell
from lit_fedad.report.console import Display
from lit_fedad.report.files import whole_file
from lit_fedad.report.markdown import markdown_table
from lit_fedad.report.tables import UNKNOWN, Row, Setting, Table

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

    Args:
        name: Name of the table, and of its files.
        table: The table.
        rows: Rows to show.
        columns: Columns of the paper.
        common: Overrides of all cells.
        out: Folder of the files.
        display: Prints the table.

    Returns:
        The files.

    Raises:
        UserError: For overrides that cannot be composed, naming row and column.
    """
    lines = []
    for row in rows:
        line = {table.rows_are: row.label}
        for column in columns:
            line |= _cells(table, row, column, common)
        lines.append(line)
    frame = pd.DataFrame(lines)
    files = [out / f"{name}.md", out / f"{name}.csv"]
    body = markdown_table(list(frame.columns), frame.to_numpy().tolist())
    caption, note = _CAPTIONS[table.cells], " ".join(table.note.split())
    with whole_file(files[0]) as part:
        part.write_text(
            f"# {table.title}\n\nThe paper's: {table.source}.\n\n{body}\n\n- {caption}\n\n{note}\n"
        )
    with whole_file(files[1]) as part:
        frame.map(csv_cell).to_csv(part, index=False)
    display.note(table.title)
    display.table(lines)
    display.note(caption)
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
