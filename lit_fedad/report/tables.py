"""A paper's table out of finished runs: one line a run, then means over seeds beside the paper's numbers.

Nothing is run here and nothing is read from disk. All that a table says of a run comes from its ``result.json``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import pandas as pd

from lit_fedad.report.markdown import markdown_table
from lit_fedad.report.naming import human_bytes, human_seconds, metric_title

UNKNOWN = "–"  # noqa: RUF001

_WHOLE = ("best_round", "rounds", "training_images", "image_size")

_BRACKETS = {
    "best": "the best round, which a run chooses by its first metric on the test set",
    "task_1": "the last round of the first task",
}

PaperNumber = float | Sequence[float] | None
"""As printed, in per cent: a mean, or mean and deviation; None where the paper has none."""


@dataclass(frozen=True)
class Row:
    """A row of the table.

    Attributes:
        label: What stands at its beginning.
        overrides: What its runs are configured with.
        paper: The paper's numbers, one a metric, by the name of the data; by the column's label, where settings
            tell columns apart.
        ending: Of the metrics' names in results, where one run holds several classifiers' (``"_lp"``).
    """

    label: str
    overrides: Sequence[str]
    paper: Mapping[str, Sequence[PaperNumber]] = field(default_factory=dict)
    ending: str = ""


@dataclass(frozen=True)
class Setting:
    """A column that stands for data under certain settings.

    Attributes:
        data: Name of the data's configuration.
        overrides: What else its runs are configured with; what is given to every run does not change it.
    """

    data: str
    overrides: Sequence[str]


@dataclass(frozen=True)
class Table:
    """What a table shows.

    Attributes:
        title: Its title.
        source: Where the paper's numbers were printed.
        metrics: Names of metrics in results. All are shares of one, shown in per cent.
        rows_are: What the rows differ in.
        columns: The paper's data, or its settings: the name of the data's configuration, or all of it, by label.
        protocol: The paper's protocol, as overrides.
        rows: The paper's rows.
        beyond: Rows that the paper does not have.
        note: What a reader should know.
        figure: What is drawn of the first metric: one line a column over the paper's ``"rows"``, or one line a row
            over the ``"tasks"``, with a panel a column.
        brackets: What stands beside the last round: the ``"best"``, or the last of the first task (``"task_1"``).
        lower_is_better: Those of the metrics of which less is better, and their kin: ``fe_svhn``,
            ``forgetting_masked``.
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
    figure: Literal["none", "rows", "tasks"] = "none"
    brackets: Literal["best", "task_1"] = "best"
    lower_is_better: Sequence[str] = ()

    def favourite(self, metric: str) -> Callable[..., float]:
        """What picks the best of several values of a metric."""
        lower = any(metric == name or metric.startswith(f"{name}_") for name in self.lower_is_better)
        return min if lower else max


@dataclass(frozen=True)
class Outcome:
    """What became of one run.

    Attributes:
        row: Label of its row.
        column: Label of its column.
        seed: Its seed.
        folder: Where its files lie.
        result: Its ``result.json``; None for a run that is not complete.
        cause: Why it failed.
        ending: That of its row.
    """

    row: str
    column: str
    seed: int
    folder: str
    result: Mapping[str, Any] | None = None
    cause: str | None = None
    ending: str = ""


def runs_frame(outcomes: Sequence[Outcome], metrics: Sequence[str]) -> pd.DataFrame:
    """One line a run; what is not known is empty.

    Args:
        outcomes: What became of the runs.
        metrics: Which metrics to take: means over clients of the first, last and best round, and of the last of
            each task where images come in tasks.

    Returns:
        Columns ``row``, ``column``, ``seed``, ``state`` (complete, failed or open), the metrics (``pro_last``,
        ``pro_task_1``), bytes, seconds and settings.
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
                **_figures(outcome.result or {}, metrics, outcome.ending),
                "folder": outcome.folder,
                "cause": outcome.cause,
            }
        )
    # Whole numbers stay whole where some are missing.
    return pd.DataFrame(lines).astype(dict.fromkeys(_WHOLE, "Int64"))


def results_table(
    table: Table, rows: Sequence[Row], columns: Mapping[str, str], runs: pd.DataFrame, bold: bool = False
) -> pd.DataFrame:
    """Metrics of the last round, mean ± sample standard deviation over seeds; in brackets what the table says.

    Args:
        table: Metrics and headings.
        rows: Which of its rows.
        columns: What the paper's numbers for a column are found by, by its label.
        runs: From `runs_frame`.
        bold: Whether our best value of each column is set in bold, in Markdown.

    Returns:
        Texts, ready to print.
    """
    cells: dict[str, list[str]] = {table.rows_are: [row.label for row in rows]}
    for column, key in columns.items():
        for index, metric in enumerate(table.metrics):
            single = len(table.metrics) == 1
            head = column if single else f"{column} {metric_title(metric)}"
            groups = [runs[(runs["row"] == row.label) & (runs["column"] == column)] for row in rows]
            texts = [_cell(group, metric, table.brackets) for group in groups]
            if bold:
                means = [round(100 * group[f"{metric}_last"].mean(), 2) for group in groups]
                best = table.favourite(metric)((mean for mean in means if mean == mean), default=None)
                texts = [f"**{t}**" if mean == best else t for t, mean in zip(texts, means, strict=True)]
            cells[head] = texts
            printed = [row.paper[key][index] if key in row.paper else None for row in rows]
            if any(number is not None for number in printed):
                cells[f"{head}, paper"] = [_paper(number) for number in printed]
    return pd.DataFrame(cells)


def costs_table(table: Table, rows: Sequence[Row], runs: pd.DataFrame) -> pd.DataFrame:
    """What each row cost, and what it was run with; from lowest to highest where its runs differ."""
    lines = []
    for row in rows:
        group = runs[(runs["row"] == row.label) & (runs["state"] == "complete")]
        lines.append(
            {
                table.rows_are: row.label,
                "up a round": _span(group["bytes_up"], _bytes),
                "down a round": _span(group["bytes_down"], _bytes),
                "in all": _span(group["bytes_in_all"], _bytes),
                "time of a round": _span(group["seconds"], human_seconds),
                "rounds": _span(group["rounds"], lambda value: f"{value:.0f}"),
                "learning rate": _span(group["learning_rate"], lambda value: f"{value:g}"),
                "backbone, weights": _distinct(group["backbone"]),
                "partition": _distinct(group["partition"]),
                "seeds": ", ".join(map(str, sorted(set(group["seed"])))) or UNKNOWN,
            }
        )
    return pd.DataFrame(lines)


def caption(table: Table, columns: Sequence[str], runs: pd.DataFrame) -> list[str]:
    """What the numbers mean, and what each column was measured on."""
    lines = [
        "Per cent. Ours: mean over clients on the common test set after the last round, mean ± sample standard "
        f"deviation over seeds; in brackets {_BRACKETS[table.brackets]}.",
        "Bytes: of one client, mean over clients; a round is the last training round, set-up exchanges count in "
        "all. Time: median of the training rounds.",
    ]
    for column in columns:
        group = runs[runs["column"] == column]
        done = group[group["state"] == "complete"]
        facts = [
            f"data {_distinct(done['data'])}",
            f"{_distinct(done['training_images'])} training images",
            f"{_distinct(done['image_size'])} pixels",
            f"{len(done)} of {len(group)} runs complete",
        ]
        lines.append(f"{column}: {', '.join(facts)}.")
    return lines


def markdown(table: Table, chosen: Sequence[str], columns: Mapping[str, str], runs: pd.DataFrame) -> str:
    """The whole report.

    Args:
        table: What it shows.
        chosen: Labels of the rows to show.
        columns: As for `results_table`.
        runs: From `runs_frame`.
    """
    blocks = [
        ("", [row for row in table.rows if row.label in chosen]),
        ("## Beyond the paper", [row for row in table.beyond if row.label in chosen]),
    ]
    parts = [f"# {table.title}", f"The paper's numbers: {table.source}."]
    for head, rows in blocks:
        if rows:
            parts += [head, _markdown_of(results_table(table, rows, columns, runs, bold=True))]
            parts += [_markdown_of(costs_table(table, rows, runs))]
    lines = [*caption(table, list(columns), runs), "Bold: our best of a column."]
    parts.append("\n".join(f"- {line}" for line in lines))
    parts.append(" ".join(table.note.split()))
    return "\n\n".join(part for part in parts if part) + "\n"


def _markdown_of(frame: pd.DataFrame) -> str:
    return markdown_table(list(frame), frame.to_numpy().tolist())


def _figures(result: Mapping[str, Any], metrics: Sequence[str], ending: str) -> dict[str, Any]:
    """What a table needs of a result; all of it None for a run without one."""
    moments = {
        moment: {name: values["mean"] for name, values in result.get(moment, {}).items() if name != "round"}
        for moment in ("first", "last", "best")
    }
    for task, round in enumerate(result.get("milestones", []), start=1):
        moments[f"task_{task}"] = result["metrics"][str(round)]
    figures = {
        f"{metric}_{moment}": _float(means.get(f"{metric}{ending}"))
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
    everything = sum(result["bytes_up"]) + sum(result["bytes_down"])
    trained = "loss" in result["scalars"][-1]
    # Whose own learning rate comes first: the client's, that of a server that trains, the task's.
    method, task = config["method"], config["task"]
    sections = (method["client"], method.get("server", {}).get("training", {}), task)
    rates = [part["learning_rate"] for part in sections if part.get("learning_rate") is not None]
    learning_rate = rates[0] if rates else None
    return {
        "best_round": result["best"]["round"],
        "bytes_up": result["bytes_up"][training[-1]] / len(sizes) if training else None,
        "bytes_down": result["bytes_down"][training[-1]] / len(sizes) if training else None,
        "bytes_in_all": everything / len(sizes),
        "seconds": seconds.median() if training else None,
        "rounds": result["rounds"],
        "learning_rate": learning_rate if trained else None,
        "backbone": f"{result['backbone']['name']}, {result['backbone']['taken']}",
        "partition": f"{result['partition']['strategy']}, {len(sizes)} client{'s' if len(sizes) > 1 else ''}",
        "data": result["data"],
        "training_images": sum(sizes),
        "image_size": config["image"]["size"],
        "mlflow_run": result["tracking_run_id"],
    }


def _cell(runs: pd.DataFrame, metric: str, brackets: str) -> str:
    values = runs[f"{metric}_last"].dropna()
    if values.empty:
        return "failed" if (runs["state"] == "failed").any() else UNKNOWN
    text = f"{100 * values.mean():.2f}"
    if len(values) > 1:
        text += f" ± {100 * values.std():.2f}"
    beside = runs[f"{metric}_{brackets}"].mean() if f"{metric}_{brackets}" in runs else math.nan
    if not math.isnan(beside):
        text += f" [{100 * beside:.2f}]"
    return text if len(values) == len(runs) else f"{text} ({len(values)} of {len(runs)} seeds)"


def _paper(number: PaperNumber) -> str:
    if number is None:
        return UNKNOWN
    return " ± ".join(f"{part:.2f}" for part in (number if isinstance(number, Sequence) else [number]))


def _float(value: float | None) -> float:
    return float("nan") if value is None else float(value)


def _bytes(value: float) -> str:
    return human_bytes(round(value))


def _span(values: pd.Series, text: Callable[[float], str]) -> str:
    known = values.dropna().astype(float)
    if known.empty:
        return UNKNOWN
    lowest, highest = text(known.min()), text(known.max())
    return lowest if lowest == highest else f"{lowest} to {highest}"


def _distinct(values: pd.Series) -> str:
    return "; ".join(dict.fromkeys(map(str, values.dropna()))) or UNKNOWN
