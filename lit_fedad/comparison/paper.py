"""Which cells of the papers' tables tracked runs fill, and which commands make those that are missing."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pandas as pd
import yaml

from lit_fedad.comparison.runs import CompleteRun, differences, shortened
from lit_fedad.comparison.table import read_table
from lit_fedad.config import Config, choices, compose, conf_folder, flatten
from lit_fedad.errors import UserError
from lit_fedad.report.tables import Outcome, Row, Setting, Table, runs_frame

SEEDS = (0, 1, 2)

# What belongs to a row where it differs from the paper's; all else belongs to the column.
_OF_ROWS = ("method", "task")
_MOST_WORDS = 16


@dataclass(frozen=True)
class Place:
    """A run in a table.

    Attributes:
        run: The run.
        row: Its row.
        column: Label of the paper's column; None for data or settings that the paper has not.
        row_differs: In what it differs from the row.
        column_differs: In what it differs from the column.
    """

    run: CompleteRun
    row: Row
    column: str | None
    row_differs: Mapping[str, str]
    column_differs: Mapping[str, str]

    @property
    def exact(self) -> bool:
        """Whether it is a run that the table asks for."""
        return self.column is not None and not self.row_differs and not self.column_differs


@dataclass(frozen=True)
class FilledTable:
    """A paper's table with the runs that there are.

    Attributes:
        name: The table's.
        table: What it shows; its rows include those that differ from the paper's.
        columns: What the paper's numbers are found by, by label.
        runs: Runs by labels of row and column.
        notes: In what rows and columns differ from the paper's.
        exact: Row, column and seed of the runs that the table asks for.
        beside: What is missing of columns that the paper has not, and the commands that make it.
    """

    name: str
    table: Table
    columns: Mapping[str, str]
    runs: Mapping[tuple[str, str], Sequence[CompleteRun]]
    notes: Sequence[str]
    exact: frozenset[tuple[str, str, int]]
    beside: Sequence[tuple[str, str]]

    def frame(self) -> pd.DataFrame:
        """One line a run."""
        endings = {row.label: row.ending for row in (*self.table.rows, *self.table.beyond)}
        outcomes = [
            Outcome(row, column, run.seed, str(run.files), run.result, None, endings[row])
            for (row, column), runs in self.runs.items()
            for run in runs
        ]
        return runs_frame(outcomes, self.table.metrics)


def fill(name: str, runs: Sequence[CompleteRun]) -> FilledTable | None:
    """A table with the runs that belong to it; None if none does.

    Data that the paper has not are shown where two rows can be compared, one of them by the paper's method.

    Args:
        name: The table's, of ``conf/table``.
        runs: In the order of their beginning: of several alike the last counts.
    """
    _, table = read_table(name)
    places = [place for run in runs for place in _places(table, run)]
    labels = _Labels(table)
    found: dict[tuple[str, str], dict[int, CompleteRun]] = {}
    for place in places:
        if place.column is not None or _worth_a_column(name, place, places):
            key = (labels.row(place), labels.column(place))
            found.setdefault(key, {})[place.run.seed] = place.run
    if not found:
        return None
    present = {row for row, _ in found}
    columns = {labels.columns[column] for _, column in found}
    return FilledTable(
        name,
        replace(
            table,
            rows=labels.rows(table.rows, present, columns),
            beyond=labels.rows(table.beyond, present, columns),
        ),
        {label: labels.columns[label] for label in dict.fromkeys(column for _, column in found)},
        {key: [by_seed[seed] for seed in sorted(by_seed)] for key, by_seed in found.items()},
        labels.notes,
        frozenset((p.row.label, p.column, p.run.seed) for p in places if p.exact and p.column),
        _missing_beside(name, table, [p for p in places if _worth_a_column(name, p, places)], labels),
    )


def missing(name: str, exact: Iterable[tuple[str, str, int]]) -> list[tuple[str, str]]:
    """What is missing of a paper's table, and the commands that make it.

    Args:
        name: The table's.
        exact: Row, column and seed of the runs that there are.

    Returns:
        Pairs of what and how.
    """
    _, table = read_table(name)
    there = set(exact)
    # One command takes several data sets, where they lack the same rows and seeds.
    lacking: dict[tuple[tuple[str, ...], tuple[int, ...]], list[str]] = {}
    for data in dict.fromkeys(_data_of(column) for column in table.columns.values()):
        absent = [
            (row.label, seed)
            for row in table.rows
            for seed in SEEDS
            for column, value in table.columns.items()
            if _data_of(value) == data and (row.label, column, seed) not in there
        ]
        if absent:
            rows, seeds = (tuple(dict.fromkeys(part)) for part in zip(*absent, strict=True))
            lacking.setdefault((rows, tuple(sorted(seeds))), []).append(data)
    pairs = []
    for (rows, seeds), sets in lacking.items():
        every = len(rows) == len(table.rows)
        words = [f"table={name}", *(f"root.{data}=DIR" for data in sets)]
        words += [] if every else [shlex.quote(f"rows={','.join(rows)}")]
        words += [] if seeds == SEEDS else [f"seeds={','.join(map(str, seeds))}"]
        what = f"{'all rows' if every else ', '.join(rows)} on {', '.join(sets)}, seeds {', '.join(map(str, seeds))}"
        pairs.append((f"{table.title} ({table.source}): {what}", f"lit-fedad report {' '.join(words)}"))
    return pairs


def _missing_beside(
    name: str, table: Table, places: Sequence[Place], labels: _Labels
) -> list[tuple[str, str]]:
    """Rows and seeds that columns which the paper has not still lack, where a command makes them."""
    columns: dict[str, list[Place]] = {}
    for place in places:
        columns.setdefault(labels.column(place), []).append(place)
    pairs = []
    for column, there in columns.items():
        one = there[0]
        words = [*one.column_differs.values(), *_column(table, one.run)[1]]
        again = _composed((*words, *one.row.overrides), "root" in one.run.config["data"])
        if differences(one.run.config, again).keys() != one.row_differs.keys():
            continue
        seeds = sorted({place.run.seed for place in there})
        done = {(place.row.label, place.run.seed) for place in there if not place.row_differs}
        absent = [(row.label, seed) for row in table.rows for seed in seeds if (row.label, seed) not in done]
        if absent:
            rows, lacking = (list(dict.fromkeys(part)) for part in zip(*absent, strict=True))
            words += [f"rows={','.join(rows)}", f"seeds={','.join(map(str, sorted(lacking)))}"]
            pairs.append(
                (
                    f"{table.title}, {column}: {', '.join(rows)}, seeds {', '.join(map(str, sorted(lacking)))}",
                    shlex.join(["lit-fedad", "report", f"table={name}", *words]),
                )
            )
    return pairs


class _Labels:
    """Names rows and columns, those that differ from the paper's by a mark that a note explains."""

    def __init__(self, table: Table) -> None:
        self.table = table
        self.notes: list[str] = []
        self.columns: dict[str, str] = {}
        self._marks: dict[tuple[str, str], str] = {}
        self._variants: dict[str, list[str]] = {}

    def row(self, place: Place) -> str:
        label = self._marked(place.row.label, place.row_differs)
        if label != place.row.label and label not in self._variants.get(place.row.label, ()):
            self._variants.setdefault(place.row.label, []).append(label)
        return label

    def column(self, place: Place) -> str:
        name = place.column or place.run.result["data"]
        label = self._marked(name, place.column_differs)
        # The paper's numbers belong to its settings, or to its data whatever the settings.
        setting = isinstance(self.table.columns.get(name), Setting)
        self.columns[label] = name if setting else _data_name(place.run.config)
        return label

    def rows(self, rows: Sequence[Row], present: set[str], columns: set[str]) -> list[Row]:
        """The rows, each with its variants: those that have runs, or at least the paper's numbers.

        Args:
            rows: The paper's.
            present: Labels of those that have runs.
            columns: What the paper's numbers are found by.
        """
        shown = []
        for row in rows:
            labels = [row.label, *self._variants.get(row.label, ())]
            kept = [label for label in labels if label in present]
            if not kept and not columns.isdisjoint(row.paper):
                kept = [row.label]
            shown += [replace(row, label=label) for label in kept]
        return shown

    def _marked(self, label: str, differs: Mapping[str, str]) -> str:
        if not differs:
            return label
        words = ", ".join(differs.values())
        if (label, words) not in self._marks:
            mark = chr(ord("a") + len(self._marks)) if len(self._marks) < 26 else f"a{len(self._marks)}"
            self._marks[label, words] = mark
            self.notes.append(f"({mark}) {label} with {shortened(list(differs.values()), _MOST_WORDS)}.")
        return f"{label} ({self._marks[label, words]})"


def _places(table: Table, run: CompleteRun) -> list[Place]:
    """Where a run stands in a table: in the row of its method that it differs least from; one a classifier."""
    column, words = _column(table, run)
    differing = [
        (row, differences(run.config, _composed((*words, *row.overrides), "root" in run.config["data"])))
        for row in (*table.rows, *table.beyond)
        if f"method={run.config['method']['name']}" in row.overrides and _measured(table, row, run)
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


def _measured(table: Table, row: Row, run: CompleteRun) -> bool:
    return run.result["last"].get(f"{table.metrics[0]}{row.ending}", {}).get("mean") is not None


def _column(table: Table, run: CompleteRun) -> tuple[str | None, tuple[str, ...]]:
    """The paper's column of a run's data, None if there is none; and the words that its runs begin with."""
    data = _data_name(run.config)
    for label, column in table.columns.items():
        if _data_of(column) == data and (
            isinstance(column, str) or all(_holds(word, run.config) for word in column.overrides)
        ):
            settings = () if isinstance(column, str) else column.overrides
            return label, (*table.protocol, f"data={data}", *settings)
    if data in choices("experiment"):
        return None, (f"experiment={data}",)
    return None, (f"data={data}",) if data in choices("data") else ()


def _worth_a_column(name: str, place: Place, places: Sequence[Place]) -> bool:
    """Whether runs on data that the paper has not can be compared with each other."""
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


@cache
def _composed(words: tuple[str, ...], root: bool) -> Config:
    """What words compose to; data that must be told where they lie are told something."""
    try:
        return compose([*words, *(["data.root=DIR"] if root else [])])
    except UserError:  # words of a row that do not go with the data
        return {}


def _holds(word: str, config: Config) -> bool:
    """Whether a configuration fulfils an override, as far as can be told without composing it."""
    values = flatten(config)
    key, _, text = word.partition("=")
    if key == "method":
        return config["method"]["name"] == text
    if key.startswith("~"):
        return key[1:] not in values
    if key in _groups() or "${" in text:
        return True
    return key in values and values[key] == _number(yaml.safe_load(text))


@cache
def _groups() -> frozenset[str]:
    """Names of the configuration's groups."""
    return frozenset(path.name for path in conf_folder().iterdir() if path.is_dir())


def _number(value: Any) -> Any:
    """YAML takes 3e-4 for a text."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


def _data_of(column: str | Setting) -> str:
    return column.data if isinstance(column, Setting) else column


def _data_name(config: Config) -> str:
    """Name of the data's configuration."""
    return config["data"].get("name") or config["data"]["_target_"].rpartition(".")[2]
