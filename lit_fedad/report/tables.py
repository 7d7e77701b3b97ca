"""A paper's table made of finished runs: one line for each run, then means over seeds beside the paper's numbers.

Nothing is run here and nothing is read from disk. All facts about a run come from its ``result.json``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import pandas as pd

from lit_fedad.report.html import Cell, Grid, Line
from lit_fedad.report.naming import human_bytes, human_seconds, metric_title

UNKNOWN = "–"  # noqa: RUF001

_INTEGERS = ("best_round", "rounds", "training_images")

Link = Callable[[str, str | None], str | None]
"""Finds the address of the runs of a row, in one column or in all."""

PaperNumber = float | Sequence[float] | None
"""A printed number in per cent: a mean, or mean and deviation; None where the paper has none."""


@dataclass(frozen=True)
class Row:
    """A row of the table.

    Attributes:
        paper: The paper's numbers, one a metric, by the name of the data, or by the column's label if columns
            differ in settings. In a table of declared forms the only number is in MiB.
        ending: Ending of the metrics' names in results (``"_lp"``), if one run has metrics of several classifiers.
    """

    label: str
    overrides: Sequence[str]
    paper: Mapping[str, Sequence[PaperNumber]] = field(default_factory=dict)
    ending: str = ""


@dataclass(frozen=True)
class Setting:
    """A column for data under certain settings.

    Attributes:
        data: Name of the data's configuration.
        overrides: Further overrides of its runs, which overrides for all runs do not change.
        images: Published number of its training images; only tables made of declared forms need it.
        classes: Number of its classes; likewise.
    """

    data: str
    overrides: Sequence[str]
    images: int = 0
    classes: int = 0


@dataclass(frozen=True)
class Table:
    """Content of a table.

    Attributes:
        source: Place where the paper's numbers were printed; empty for a table of this library's own.
        metrics: Names of metrics in results. All are shares of one, shown in per cent. None in a table of declared
            forms.
        columns: The paper's columns by label: the name of a data configuration, or data with settings.
        protocol: The paper's protocol, as overrides.
        beyond: Rows that the paper does not have.
        figure: Figure of the first metric: one line a column over the paper's ``"rows"``, or one line a row over
            the stages (``"tasks"``) with one panel a column. Or one line a row over the rounds, of all clients
            (``"rounds"``) or of each (``"clients"``). Or pictures that runs drew themselves (``"sheets"``).
        quantities: Metrics and scalars of training that a figure over rounds draws; ``loss`` of each client.
        sheet: Name of the picture of a run that a figure of sheets shows.
        brackets: Value in brackets beside the last round: that of the ``"best"`` round, or of the last round of the
            first stage (``"task_1"``).
        cells: What cells are made of: results of ``"runs"``; or, without any run, declared forms of messages: the
            ``"upload"`` of all clients in a round, in MiB, or what crosses in all ``"messages"``.
        attack: Options of ``lit-fedad privacy``, by which each complete run is attacked; empty for no attack. The
            table's metrics are then numbers of the attack.
        lower_is_better: Metrics of which a lower value is better. They stand for all metrics that begin with one
            of these names and ``_``: ``fe`` for ``fe_svhn``, ``forgetting`` for ``forgetting_masked``.
    """

    title: str
    source: str
    metrics: Sequence[str]
    rows_are: str
    columns: Mapping[str, str | Setting]
    protocol: Sequence[str]
    rows: Sequence[Row]
    beyond: Sequence[Row] = ()
    note: str = ""
    figure: Literal["none", "rows", "tasks", "rounds", "clients", "sheets"] = "none"
    quantities: Sequence[str] = ()
    sheet: str = ""
    brackets: Literal["best", "task_1"] = "best"
    cells: Literal["runs", "upload", "messages"] = "runs"
    attack: Sequence[str] = ()
    lower_is_better: Sequence[str] = ()

    def favourite(self, metric: str) -> Callable[..., float]:
        """Returns the function that picks the best of several values of a metric, `min` or `max`."""
        lower = any(metric == name or metric.startswith(f"{name}_") for name in self.lower_is_better)
        return min if lower else max


@dataclass(frozen=True)
class Outcome:
    """State and result of one run of a table.

    Attributes:
        result: Content of its ``result.json``; None if it is not complete.
        cause: Cause of its failure; None if it did not fail.
        ending: Ending of the metrics' names, as in `Row`.
        constant: Name of the constant prediction whose accuracies the outcome stands for, in place of the run's.
    """

    row: str
    column: str
    seed: int
    folder: str
    result: Mapping[str, Any] | None = None
    cause: str | None = None
    ending: str = ""
    constant: str = ""


def runs_frame(outcomes: Sequence[Outcome], metrics: Sequence[str]) -> pd.DataFrame:
    """Lists runs, one line each; unknown values are empty.

    Args:
        outcomes: The runs.
        metrics: Metrics to list: their means over clients in the first, last and best round, and in the last
            round of each stage if the data come in stages.

    Returns:
        Columns ``row``, ``column``, ``seed``, ``state`` (complete, failed or open), the metrics (``pro_last``,
        ``pro_task_1`` for the first stage), bytes, seconds and settings.
    """
    lines = []
    for outcome in outcomes:
        state = "complete" if outcome.result else "failed" if outcome.cause else "open"
        lines.append(
            {
                "row": outcome.row,
                "column": outcome.column,
                "seed": outcome.seed,
                "state": state,
                **_table_values(_of_constant(outcome), metrics, outcome.ending),
                "folder": outcome.folder,
                "cause": outcome.cause,
            }
        )
    # Whole numbers stay whole where some are missing.
    return pd.DataFrame(lines).astype(dict.fromkeys(_INTEGERS, "Int64"))


def results_grid(
    table: Table, rows: Sequence[Row], columns: Mapping[str, str], runs: pd.DataFrame, link: Link, title: str
) -> Grid:
    """Tabulates metrics of the last round: mean ± sample deviation over seeds; our best of a column in bold."""
    heads, cells = [table.rows_are], [[Cell(row.label) for row in rows]]
    for column, key in columns.items():
        for index, metric in enumerate(table.metrics):
            heads.append(column if len(table.metrics) == 1 else f"{column} {metric_title(metric)}")
            groups = [runs[(runs["row"] == row.label) & (runs["column"] == column)] for row in rows]
            means = [round(100 * group[f"{metric}_last"].mean(), 2) for group in groups]
            best = table.favourite(metric)((mean for mean in means if not math.isnan(mean)), default=None)
            cells.append(
                [
                    Cell(_cell_text(group, metric, table.brackets), link(row.label, column), mean == best)
                    for row, group, mean in zip(rows, groups, means, strict=True)
                ]
            )
            printed = [row.paper[key][index] if key in row.paper else None for row in rows]
            if any(number is not None for number in printed):
                heads.append(f"{heads[-1]}, paper")
                cells.append([Cell(_paper_text(number)) for number in printed])
    return Grid(title, heads, [Line(line) for line in zip(*cells, strict=True)])


def costs_grid(table: Table, rows: Sequence[Row], runs: pd.DataFrame, link: Link, title: str) -> Grid:
    """Tabulates bytes, time and settings of each row, from lowest to highest where its runs differ."""
    lines = []
    for row in rows:
        group = runs[(runs["row"] == row.label) & (runs["state"] == "complete")]
        texts = {
            table.rows_are: row.label,
            "up a round": _span(group["bytes_up"], human_bytes),
            "down a round": _span(group["bytes_down"], human_bytes),
            "in all": _span(group["bytes_in_all"], human_bytes),
            "time of a round": _span(group["seconds"], human_seconds),
            "rounds": _span(group["rounds"], lambda value: f"{value:.0f}"),
            "learning rate": _span(group["learning_rate"], lambda value: f"{value:g}"),
            "backbone, weights": distinct(group["backbone"]),
            "partition": distinct(group["partition"]),
            "seeds": ", ".join(map(str, sorted(set(group["seed"])))) or UNKNOWN,
        }
        lines.append(Line.of(texts.values(), link(row.label, None)))
    return Grid(title, list(texts), lines)


def _of_constant(outcome: Outcome) -> Mapping[str, Any]:
    """Returns the result of an outcome, with the accuracies of its constant prediction in place of the run's."""
    result = outcome.result or {}
    if not outcome.constant:
        return result
    accuracies = result["constants"][outcome.constant]
    moments = {
        moment: {
            "round": result[moment]["round"],
            **{name: {"mean": value} for name, value in accuracies[str(result[moment]["round"])].items()},
        }
        for moment in ("first", "last", "best")
    }
    return {**result, **moments, "metrics": accuracies}


def _table_values(result: Mapping[str, Any], metrics: Sequence[str], ending: str) -> dict[str, Any]:
    """Extracts the values of a table from a result; all are None for a run without one."""
    moments = {
        moment: {name: values["mean"] for name, values in result.get(moment, {}).items() if name != "round"}
        for moment in ("first", "last", "best")
    }
    stages = result.get("stage_rounds") or [[round] for round in result.get("milestones", [])]
    for stage, rounds in enumerate(stages, start=1):
        of_rounds = pd.DataFrame([result["metrics"][str(round)] for round in rounds], dtype=float)
        moments[f"task_{stage}"] = of_rounds.mean(skipna=False).to_dict()
    figures = {
        f"{metric}_{moment}": math.nan if (mean := means.get(f"{metric}{ending}")) is None else float(mean)
        for metric in metrics
        for moment, means in moments.items()
    }
    settings = ("best_round", "bytes_up", "bytes_down", "bytes_in_all", "seconds", "rounds", "learning_rate",
                "backbone", "partition", "data", "training_images", "image_size", "mlflow_run")  # fmt: skip
    return {**figures, **dict.fromkeys(settings), **(_settings(result) if result else {})}


def _settings(result: Mapping[str, Any]) -> dict[str, Any]:
    config, sizes = result["config"], result["partition"]["sizes"]
    training = [index for index, exchange in enumerate(result["exchanges"]) if exchange > 0]
    seconds = pd.Series([result["seconds_per_round"][index] for index in training], dtype=float)
    total_bytes = sum(result["bytes_up"]) + sum(result["bytes_down"])
    trained = "loss" in result["scalars"][-1]
    # The first that is set: the client's learning rate, that of a server that trains, the task's.
    method, task = config["method"], config["task"]
    sections = (method["client"], method.get("server", {}).get("training", {}), task)
    rates = [section["learning_rate"] for section in sections if section.get("learning_rate") is not None]
    return {
        "best_round": result["best"]["round"],
        "bytes_up": result["bytes_up"][training[-1]] / len(sizes) if training else None,
        "bytes_down": result["bytes_down"][training[-1]] / len(sizes) if training else None,
        "bytes_in_all": total_bytes / len(sizes),
        "seconds": seconds.median() if training else None,
        "rounds": result["rounds"],
        "learning_rate": rates[0] if rates and trained else None,
        "backbone": f"{result['backbone']['name']}, {result['backbone']['taken']}",
        "partition": f"{result['partition']['strategy']}, {len(sizes)} client{'s' if len(sizes) > 1 else ''}",
        "data": result["data"],
        "training_images": sum(sizes),
        "image_size": str(config["image"]["size"]),
        "mlflow_run": result["tracking_run_id"],
    }


def _cell_text(runs: pd.DataFrame, metric: str, brackets: str) -> str:
    values = runs[f"{metric}_last"].dropna()
    if values.empty:
        return "failed" if (runs["state"] == "failed").any() else UNKNOWN
    text = f"{100 * values.mean():.2f}"
    if len(values) > 1:
        text += f" ± {100 * values.std():.2f}"
    bracketed = runs[f"{metric}_{brackets}"].mean() if f"{metric}_{brackets}" in runs else math.nan
    if not math.isnan(bracketed):
        text += f" [{100 * bracketed:.2f}]"
    return text if len(values) == len(runs) else f"{text} ({len(values)} of {len(runs)} seeds)"


def _paper_text(number: PaperNumber) -> str:
    if number is None:
        return UNKNOWN
    return " ± ".join(f"{part:.2f}" for part in (number if isinstance(number, Sequence) else [number]))


def _span(values: pd.Series, text: Callable[[float], str]) -> str:
    known = values.dropna().astype(float)
    if known.empty:
        return UNKNOWN
    lowest, highest = text(known.min()), text(known.max())
    return lowest if lowest == highest else f"{lowest} to {highest}"


def distinct(values: pd.Series) -> str:
    """Lists values that differ, each once, in their order; `UNKNOWN` where there are none."""
    return "; ".join(dict.fromkeys(map(str, values.dropna()))) or UNKNOWN


_BRACKETS = {
    "best": "the best round, which a run chooses by its first metric on the test set",
    "task_1": "the last round of the first task",
}


def caption(table: Table, columns: Sequence[str], runs: pd.DataFrame) -> list[str]:
    """Explains the numbers, and names their source and the data of each column."""
    explanation = (
        "Per cent. Ours: mean over clients on the common test set after the last round, mean ± sample standard "
        f"deviation over seeds; in brackets {_BRACKETS[table.brackets]}. Bold: our best of a column."
    )
    if table.attack:
        explanation = (
            "Per cent. Ours: what membership inference finds in what clients send, mean over the attacked shadow runs; "
            "mean ± sample standard deviation over seeds."
        )
    lines = [
        explanation,
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
    source = f"The paper's numbers: {table.source}." if table.source else ""
    return [*filter(None, [source]), *lines, *filter(None, [" ".join(table.note.split())])]
