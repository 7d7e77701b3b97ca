"""Places complete runs in the rows and columns of a paper's table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import yaml

from lit_fedad.core.config import Config, choices, compose, conf_folder, flatten
from lit_fedad.core.errors import UserError
from lit_fedad.papers.runs import CompleteRun, differences
from lit_fedad.report.tables import Row, Setting, Table

# Sections that belong to a row where they differ from the paper's; all others belong to the column.
_OF_ROWS = ("method", "task")


@dataclass(frozen=True)
class Place:
    """A run in a table.

    Attributes:
        run: The run.
        row: Its row.
        column: Label of the paper's column; None for data or settings that the paper does not have.
        row_differs: Overrides in which it differs from the row, by key.
        column_differs: Overrides in which it differs from the column, by key.
    """

    run: CompleteRun
    row: Row
    column: str | None
    row_differs: Mapping[str, str]
    column_differs: Mapping[str, str]

    @property
    def exact(self) -> bool:
        """Tells whether the table itself lists the run."""
        return self.column is not None and not self.row_differs and not self.column_differs


def places_of(table: Table, run: CompleteRun) -> list[Place]:
    """Finds the rows of a run's method that the run differs least from.

    Returns:
        Its places: none if the table has no row for it; several if the run holds several classifiers.
    """
    column = paper_column(table, run)
    base = column_overrides(table, run)
    differing = [
        (row, differences(run.config, composed((*base, *row.overrides), run)))
        for row in (*table.rows, *table.beyond)
        if f"method={run.config['method']['name']}" in row.overrides
        and _of_task(row, base, run)
        and _measured(table, row, run)
    ]
    least = min((len(differs) for _, differs in differing), default=0)
    places = []
    for row, differs in differing:
        of_row = {key: value for key, value in differs.items() if key.partition(".")[0] in _OF_ROWS}
        # A method stays itself with another learning rate; where rows are values of a setting, it is another row.
        if len(differs) == least and (table.rows_are == "method" or not of_row):
            rest = {key: value for key, value in differs.items() if key not in of_row}
            places.append(Place(run, row, column, of_row, rest))
    return places


def paper_column(table: Table, run: CompleteRun) -> str | None:
    """Finds the paper's column that a run's data and settings belong to.

    Returns:
        The label; None if the paper has no such column.
    """
    data = data_name(run.config)
    for label, column in table.columns.items():
        overrides = column.overrides if isinstance(column, Setting) else ()
        if data_of(column) == data and all(_fulfils(run.config, override) for override in overrides):
            return label
    return None


def column_overrides(table: Table, run: CompleteRun) -> tuple[str, ...]:
    """Lists the overrides that runs of a run's column begin with.

    Returns:
        Those of the paper's column; the run's preset or data, where the paper has no such column.
    """
    data, label = data_name(run.config), paper_column(table, run)
    if label is not None:
        column = table.columns[label]
        settings = column.overrides if isinstance(column, Setting) else ()
        return (*table.protocol, f"data={data}", *settings)
    if data in choices("experiment"):
        return (f"experiment={data}",)
    return (f"data={data}",) if data in choices("data") else ()


def composed(overrides: tuple[str, ...], run: CompleteRun) -> Config:
    """Composes overrides for the data of a run.

    Returns:
        The configuration, with a placeholder for ``data.root``; empty if the overrides do not go with the data.
    """
    return _compose(overrides, "root" in run.config["data"])


def data_of(column: str | Setting) -> str:
    """Names the data of a table's column."""
    return column.data if isinstance(column, Setting) else column


def data_name(config: Config) -> str:
    """Names the data of a configuration: their ``name``, or that of the function that reads them."""
    return config["data"].get("name") or config["data"]["_target_"].rpartition(".")[2]


def comparable(name: str, place: Place, places: Sequence[Place]) -> bool:
    """Tells whether a run on data that the paper does not have stands beside a run of another row.

    Args:
        name: Name of the table, which begins with the paper's method.
        place: Place of the run.
        places: All places in the table.

    Returns:
        True if the runs with the same data and settings are of two rows or more, one of them of the paper's method.
    """
    if place.column is not None:
        return False
    beside = [
        other
        for other in places
        if other.column is None
        and other.run.result["data"] == place.run.result["data"]
        and other.column_differs == place.column_differs
    ]
    methods = {other.run.result["method"] for other in beside}
    own = name.partition("_")[0]
    return len({other.row.label for other in beside}) > 1 and any(m.startswith(own) for m in methods)


def _of_task(row: Row, base: tuple[str, ...], run: CompleteRun) -> bool:
    """Tells whether a run has the task of a row that names one: methods that take any task are no row by themselves."""
    if not any(override.startswith("task=") for override in row.overrides):
        return True
    config = composed((*base, *row.overrides), run)
    return bool(config) and config["task"]["_target_"] == run.config["task"]["_target_"]


def _measured(table: Table, row: Row, run: CompleteRun) -> bool:
    return run.mean(f"{table.metrics[0]}{row.ending}") is not None


@cache
def _compose(overrides: tuple[str, ...], needs_root: bool) -> Config:
    try:
        return compose([*overrides, *(["data.root=DIR"] if needs_root else [])])
    except UserError:  # overrides of a row that do not go with the data
        return {}


def _fulfils(config: Config, override: str) -> bool:
    """Tells whether a configuration fulfils an override, as far as that is known without composing it."""
    values = flatten(config)
    key, _, text = override.partition("=")
    if key == "method":
        return config["method"]["name"] == text
    if key.startswith("~"):
        return key[1:] not in values
    if key in _groups() or "${" in text:
        return True
    return key in values and values[key] == _number(yaml.safe_load(text))


@cache
def _groups() -> frozenset[str]:
    """Names the groups of the configuration."""
    return frozenset(path.name for path in conf_folder().iterdir() if path.is_dir())


def _number(value: Any) -> Any:
    """Reads numbers such as 3e-4, which YAML takes for text."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value
