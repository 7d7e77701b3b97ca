"""The tables and figures of the four papers, and the runs that a table asks for."""

import difflib
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

import yaml

from lit_fedad.core.building import call
from lit_fedad.core.config import Config, compose
from lit_fedad.core.config_groups import choices, conf_folder, files_of
from lit_fedad.core.errors import UserError
from lit_fedad.experiment.run_folder import RunFolder
from lit_fedad.report.tables import Row, Setting, Table

_ROMAN = {"I": "1", "II": "2", "III": "3", "IV": "4", "V": "5", "VI": "6"}


@dataclass(frozen=True)
class Item:
    """A table or figure of a paper.

    Attributes:
        printed: Its number, as the paper prints it.
        reason: Why there is no table of ``conf/table`` for it; empty where there is one.
    """

    paper: str
    printed: str
    shows: str
    reason: str = ""

    @property
    def name(self) -> str:
        """Name of its table in ``conf/table``.

        Example:
            >>> Item("FADngs", "Table IV", "").name, Item("FedVCK", "Fig. 1 (a)", "").name
            ('fadngs_4', 'fedvck_fig1a')
        """
        kind, number, *part = self.printed.replace("(", "").replace(")", "").split()
        number = _ROMAN.get(number, number) + "".join(part)
        return f"{self.paper.lower()}_{'fig' if kind == 'Fig.' else ''}{number}"

    @property
    def call(self) -> str:
        """Argument with which ``lit-fedad report`` makes the item; empty where nothing makes it."""
        return "" if self.reason else f"table={self.name}"


@cache
def items() -> tuple[Item, ...]:
    """Reads all items, in the order of the papers, tables before figures."""
    papers = yaml.safe_load((conf_folder() / "papers.yaml").read_text())
    return tuple(
        Item(paper, printed, **(entry if isinstance(entry, dict) else {"shows": entry}))
        for paper, entries in papers.items()
        for printed, entry in entries.items()
    )


def reason_against(name: str) -> str:
    """Returns why there is no table of an item of a paper, for a message; empty for any other name.

    Example:
        >>> reason_against("fedvck_fig2")
        'FedVCK, Fig. 2: a drawing of the method, without results'
    """
    reasons = {item.name: f"{item.paper}, {item.printed}: {item.reason}" for item in items() if item.reason}
    return reasons.get(name, "")


def listing() -> list[dict[str, str]]:
    """Lists items with what makes them, or else the reason, and tables of no paper, as lines of a table."""
    without_paper = [name for name in table_names() if name not in {item.name for item in items()}]
    return [
        {"paper": item.paper, "item": item.printed, "shows": item.shows, "made by": item.call or item.reason}
        for item in items()
    ] + [
        {"paper": "none", "item": "", "shows": read_table(name).title, "made by": f"table={name}"}
        for name in without_paper
    ]


@dataclass(frozen=True)
class Column:
    """A column of the table: what its runs are trained and tested on.

    Attributes:
        names: Names that its data can be given by, as ``root.NAME=DIR``.
    """

    label: str
    names: tuple[str, ...]
    overrides: tuple[str, ...]


@dataclass(frozen=True)
class PlannedRun:
    """A run that a table consists of, complete or not.

    Attributes:
        overrides: All its overrides, in the order in which they count.
        config: The configuration that they compose to.
    """

    row: str
    column: str
    seed: int
    overrides: tuple[str, ...]
    config: Config

    @property
    def folder(self) -> RunFolder:
        """Returns its folder, which is the same whichever command runs it."""
        return RunFolder.of(self.config)

    @property
    def title(self) -> str:
        """Names the run for messages: row, column and seed."""
        return f"{self.row} on {self.column}, seed {self.seed}"


def table_names() -> list[str]:
    """Names the tables of ``conf/table``."""
    return choices("table")


def page_tables() -> list[str]:
    """Names the tables for the page of all runs: not those without runs, nor figures that the page draws itself."""
    tables = {name: read_table(name) for name in table_names()}
    drawn = ("rounds", "clients", "sheets")
    return [name for name, table in tables.items() if table.cells == "runs" and table.figure not in drawn]


def read_table(name: str) -> Table:
    """Reads a table of ``conf/table``.

    Raises:
        UserError: If there is no such table, with the reason if a paper has it, or its file does not describe one.
    """
    if reason := reason_against(name):
        raise UserError(f"table={name}: {reason}; table=list names what can be made")
    if name not in (names := table_names()):
        raise UserError(f"table={name}: give one of {', '.join(names)}")
    return _described(name)


@cache
def _described(name: str) -> Table:
    where = f"conf/table/{name}.yaml"
    section = yaml.safe_load(files_of("table")[name].read_text())
    for key in ("rows", "beyond"):
        section[key] = [call(Row, row, f"{where}: {key}") for row in section.get(key, [])]
    for label, column in section["columns"].items():
        if isinstance(column, Mapping):
            section["columns"][label] = call(Setting, column, f"{where}: columns: {label}")
    table: Table = call(Table, section, where)
    return table


def choose_rows(name: str, table: Table, labels: Sequence[str]) -> list[Row]:
    """Chooses rows of a table by their labels.

    Raises:
        UserError: If the table has no row of such a label, naming the nearest one.
    """
    rows = {row.label.casefold(): row for row in (*table.rows, *table.beyond)}
    chosen = [label.strip().casefold() for label in labels] or list(rows)
    for label in chosen:
        if label not in rows:
            close = difflib.get_close_matches(label, rows, n=1, cutoff=0.0)
            raise UserError(f"rows={label}: {name} has no such row; did you mean '{rows[close[0]].label}'?")
    return [row for label, row in rows.items() if label in chosen]


def paper_columns(table: Table) -> list[Column]:
    """Lists the columns that the paper's table has."""
    columns = []
    for label, column in table.columns.items():
        if isinstance(column, Setting):
            overrides = (*table.protocol, f"data={column.data}", *column.overrides)
            columns.append(Column(label, (column.data,), overrides))
        else:
            overrides = (*table.protocol, f"data={column}")
            columns.append(Column(label, (column, label.casefold()), overrides))
    return columns


def own_columns(experiments: Sequence[str], data: Sequence[str]) -> list[Column]:
    """Makes a column for each pair of an experiment and a data set."""
    groups = {"experiment": experiments, "data": data}
    axes = [[(group, name) for name in names] for group, names in groups.items() if names]
    columns = []
    for choice in itertools.product(*axes) if axes else ():
        varying = [name for (_, name), axis in zip(choice, axes, strict=True) if len(axis) > 1]
        overrides = tuple(f"{group}={name}" for group, name in choice)
        columns.append(
            Column(", ".join(varying) or choice[-1][1], tuple(name for _, name in choice), overrides)
        )
    return columns


def add_roots(columns: Sequence[Column], roots: Mapping[str, str]) -> list[Column]:
    """Adds the folders of data to the overrides of columns.

    Raises:
        UserError: For a name that no column has.
    """
    names = dict.fromkeys(name for column in columns for name in column.names)
    for name in roots:
        if name not in names:
            raise UserError(f"root.{name}: no such column; one of {', '.join(names)}")
    added = [[f"data.root={roots[name]}" for name in column.names if name in roots] for column in columns]
    return [
        replace(column, overrides=(*column.overrides, *root_overrides))
        for column, root_overrides in zip(columns, added, strict=True)
    ]


def plan_runs(
    rows: Sequence[Row], columns: Sequence[Column], common: Sequence[str], seeds: Sequence[int]
) -> list[PlannedRun]:
    """Lists and composes all runs of a table, so that a misspelt override is refused before any of them begins.

    A seed that is given twice counts once.

    Raises:
        UserError: Naming row and column of an override that cannot be composed.
    """
    runs = []
    composed: dict[tuple[str, ...], Config] = {}  # rows may share runs
    for row, column, seed in itertools.product(rows, columns, dict.fromkeys(seeds)):
        overrides = (*common, *column.overrides, *row.overrides, f"seed={seed}")
        try:
            composed[overrides] = composed.get(overrides) or compose(overrides)
        except UserError as error:
            raise UserError(f"row {row.label}, column {column.label}: {error}") from error
        runs.append(PlannedRun(row.label, column.label, seed, overrides, composed[overrides]))
    return runs
