"""Section of the report: complete runs with their metrics and costs, and those that are not complete."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence

from lit_fedad.comparison.links import Links
from lit_fedad.comparison.runs import CompleteRun, GroupsByData
from lit_fedad.comparison.sections.numbers import format_metric
from lit_fedad.report.html import Block, Cell, Grid, Line
from lit_fedad.report.naming import METRIC_TITLES, human_bytes, human_seconds, metric_title
from lit_fedad.report.tables import UNKNOWN
from lit_fedad.tracking.reading import TrackedRun


def complete_table(data: GroupsByData, links: Links) -> Iterator[Block]:
    """Tabulates complete runs, one table a data set: one line a configuration, and under it one line a seed.

    Args:
        data: The runs.
        links: Addresses of the runs.

    Yields:
        The tables.
    """
    for name, groups in data.items():
        runs = [run for group in groups for run in group.runs]
        metrics = [metric for metric in METRIC_TITLES if any(metric in run.result["last"] for run in runs)]
        first = groups[0].first.first_metric
        heads = ["method", "seed", "task", "backbone", "rounds", *map(metric_title, metrics)]
        heads += [f"worst client, {metric_title(first)}", "bytes up", "time", "files"]
        lines = []
        for group in groups:
            lines.append(_line(group.label, group.runs, metrics, links, part=False))
            if len(group.runs) > 1:
                lines += [_line(group.label, [run], metrics, links, part=True) for run in group.runs]
        notes = [
            "Metrics: mean over clients after the last round; in brackets after the best, which a run chooses by its "
            "first metric on the test set. Bytes: sent by all clients in all rounds. Time: of all rounds."
        ]
        yield Grid(name, heads, lines, notes, texts=4)


def incomplete_table(
    tracked: Sequence[TrackedRun], runs: Sequence[CompleteRun], links: Links
) -> Iterator[Block]:
    """Tabulates runs that are not complete, without studies and their trials.

    Args:
        tracked: All runs.
        runs: The complete ones.
        links: Addresses of the runs.

    Yields:
        The table, if there are such runs.
    """
    complete = {run.tracked.run_id for run in runs}
    lines = [
        Line(
            [
                Cell(run.name, links.run(run)),
                Cell(run.tags["method"]),
                Cell(run.tags.get("data", UNKNOWN)),
                Cell(run.tags.get("seed", UNKNOWN)),
                Cell(run.status.lower()),
                links.folder(run),
            ]
        )
        for run in tracked
        if run.run_id not in complete and "method" in run.tags and "study" not in run.tags and not run.parent
    ]
    if lines:
        notes = ["The command that began a run continues it."]
        yield Grid("Not complete", ["run", "method", "data", "seed", "state", "files"], lines, notes, texts=6)


def _line(label: str, runs: Sequence[CompleteRun], metrics: Sequence[str], links: Links, part: bool) -> Line:
    url, one = links.runs(runs), runs[0]
    seeds = ", ".join(str(run.seed) for run in runs)

    def mean(pick: Callable[[CompleteRun], float], text: Callable[[float], str]) -> Cell:
        return Cell(text(statistics.mean(map(pick, runs))), url)

    client, value = _worst(runs, one.first_metric)
    cells = [
        Cell(f"seed {seeds}" if part else label, url),
        Cell(seeds),
        Cell(one.result["task"]),
        Cell(f"{one.result['backbone']['name']}, {one.result['backbone']['taken']}"),
        Cell(str(one.result["rounds"])),
        *(Cell(_last_and_best(runs, metric), url) for metric in metrics),
        Cell(f"{client}: {format_metric(value)}", url) if value is not None else Cell(UNKNOWN),
        mean(lambda run: sum(run.result["bytes_up"]), lambda value: human_bytes(round(value))),
        mean(lambda run: sum(run.result["seconds_per_round"]), human_seconds),
        links.folder(one.tracked) if len(runs) == 1 else Cell(""),
    ]
    return Line(cells, part)


def _last_and_best(runs: Sequence[CompleteRun], metric: str) -> str:
    """Formats mean and deviation over runs after the last round, and the mean after the best one in brackets."""
    last = [value for run in runs if (value := run.mean(metric, "last")) is not None]
    best = [value for run in runs if (value := run.mean(metric, "best")) is not None]
    if not last:
        return UNKNOWN
    text = format_metric(statistics.mean(last))
    if len(last) > 1:
        text += f" ± {format_metric(statistics.stdev(last))}"
    return f"{text} [{format_metric(statistics.mean(best))}]" if best else text


def _worst(runs: Sequence[CompleteRun], metric: str) -> tuple[str, float | None]:
    """Finds client and value of the lowest value of a metric after the last round, over all seeds."""
    values = [
        (value, run.names.title(int(client)) + (f", seed {run.seed}" if len(runs) > 1 else ""))
        for run in runs
        for client, value in run.per_client(metric).items()
    ]
    value, client = min(values, default=(None, ""))
    alike = len({value for value, _ in values}) == 1 and len(values) > 1
    return "all alike" if alike else client, value
