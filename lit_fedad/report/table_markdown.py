"""A paper's table in Markdown: results, costs, and sentences that say what the numbers are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pandas as pd

from lit_fedad.report.html import markdown_table
from lit_fedad.report.tables import Row, Table, costs_table, distinct, results_table

_BRACKETS = {
    "best": "the best round, which a run chooses by its first metric on the test set",
    "task_1": "the last round of the first task",
}


def caption(table: Table, columns: Sequence[str], runs: pd.DataFrame) -> list[str]:
    """Explains the numbers, and names the data of each column."""
    ours = (
        "Per cent. Ours: mean over clients on the common test set after the last round, mean ± sample standard "
        f"deviation over seeds; in brackets {_BRACKETS[table.brackets]}."
    )
    if table.attack:
        ours = (
            "Per cent. Ours: what membership inference finds in what clients send, mean over the attacked shadow runs; "
            "mean ± sample standard deviation over seeds."
        )
    lines = [
        ours,
        "Bytes: of one client, mean over clients; a round is the last training round, set-up exchanges count in "
        "all. Time: median of the training rounds.",
    ]
    for column in columns:
        group = runs[runs["column"] == column]
        done = group[group["state"] == "complete"]
        facts = [
            f"data {distinct(done['data'])}",
            f"{distinct(done['training_images'])} training images",
            f"{distinct(done['image_size'])} pixels",
            f"{len(done)} of {len(group)} runs complete",
        ]
        lines.append(f"{column}: {', '.join(facts)}.")
    return lines


def markdown(
    table: Table,
    chosen: Sequence[str],
    columns: Mapping[str, str],
    runs: pd.DataFrame,
    constants: tuple[Sequence[Row], pd.DataFrame] | None = None,
) -> str:
    """Writes the table with costs and caption in Markdown."""
    blocks = [
        ("", [row for row in table.rows if row.label in chosen]),
        ("## Beyond the paper", [row for row in table.beyond if row.label in chosen]),
    ]
    parts = [f"# {table.title}", f"The paper's numbers: {table.source}."]
    for head, rows in blocks:
        if rows:
            parts += [head, _markdown_of(results_table(table, rows, columns, runs, bold=True))]
            parts += [_markdown_of(costs_table(table, rows, runs))]
    if constants is not None:
        parts += [
            "## Predictions that look at no image",
            _markdown_of(results_table(table, constants[0], columns, constants[1])),
        ]
    lines = [*caption(table, list(columns), runs), "Bold: our best of a column."]
    parts.append("\n".join(f"- {line}" for line in lines))
    parts.append(" ".join(table.note.split()))
    return "\n\n".join(part for part in parts if part) + "\n"


def _markdown_of(frame: pd.DataFrame) -> str:
    return markdown_table(list(frame.columns), frame.to_numpy().tolist())
