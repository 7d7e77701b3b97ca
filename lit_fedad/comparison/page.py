"""A report of tracked runs: one HTML page and the same in Markdown."""

from __future__ import annotations

import json
import os
import re
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from pathlib import Path
from typing import Any
from urllib.parse import quote

from lit_fedad.comparison.paper import FilledTable, fill, missing
from lit_fedad.comparison.runs import CompleteRun, RunGroup, complete_runs, groups_by_data
from lit_fedad.config import choices
from lit_fedad.errors import UserError
from lit_fedad.options import key_and_value
from lit_fedad.report.console import Display
from lit_fedad.report.figures import curves_figure, whole_file
from lit_fedad.report.html import (
    Block,
    Cell,
    Commands,
    Gallery,
    Grid,
    Line,
    Page,
    Picture,
    Prose,
    Section,
    render_html,
    render_markdown,
)
from lit_fedad.report.naming import METRIC_TITLES, human_bytes, human_seconds, metric_title
from lit_fedad.report.run_figures import Curve, lines_figure, sheet, spread_figure, svg
from lit_fedad.report.tables import UNKNOWN, caption, costs_table, results_table
from lit_fedad.sweep.objective import objective_value
from lit_fedad.tracking.reading import TrackedRun, metric_history, tracked_runs

_KEYS = ("experiment", "out", "ui", "tracking.uri")
_UI = "http://127.0.0.1:5000"
_OBJECTIVE = "objectives."  # of a study, among its parameters
_SHEETS = {"heatmaps": "Heatmaps", "knowledge": "Condensed images", "representations": "Representations"}
_ATTACKS = {
    "lira": "Membership inference (LiRA)",
    "inversion": "Inversion",
    "distance_correlation": "Distance correlation",
}


def report_runs(words: Sequence[str], display: Display) -> Path:
    """Writes ``report.html``, ``report.md`` and its ``pictures``.

    Args:
        words: ``key=value`` pairs: ``experiment`` (a comma list of MLflow experiments; all by default), ``out``, ``ui``
            (where ``mlflow ui`` answers), ``tracking.uri``.
        display: Says what was written.

    Returns:
        The page.

    Raises:
        UserError: For bad input, or where there is no complete run.
    """
    given = dict(_pair(word) for word in words)
    names = [name for name in given.get("experiment", "").split(",") if name]
    out = Path(given.get("out") or f"reports/{'-'.join(names) or 'all'}")
    ui = given.get("ui", _UI).rstrip("/")
    if not ui.startswith(("http://", "https://")):
        raise UserError(f"ui={ui}: must begin with http:// or https://")
    uri = given.get("tracking.uri")
    tracked = tracked_runs(names, uri)
    with tempfile.TemporaryDirectory() as fetched:
        runs = complete_runs(tracked, Path(fetched), uri)
        if not runs:
            raise UserError(
                f"experiment={','.join(names) or '(all)'}: no complete run is tracked; lit-fedad train makes one"
            )
        with display.progress("The report"):
            page = build_page(tracked, runs, Links(ui, out), uri)
    file = write_page(page, out)
    size = human_bytes(file.stat().st_size)
    display.note(f"{len(runs)} complete runs; the page has {size}")
    display.where_next([("page", str(file)), ("text", str(out / "report.md")), ("runs", f"mlflow ui ({ui})")])
    return file


def _pair(word: str) -> tuple[str, str]:
    key, value = key_and_value(word)
    if key not in _KEYS:
        raise UserError(
            f"report without table= has no key '{key}', only {', '.join(_KEYS)}; for a paper's table: report table=..."
        )
    return key, value


def write_page(page: Page, out: Path) -> Path:
    """Writes both forms of a report; pictures of an earlier one go.

    Args:
        page: The report.
        out: Its folder.

    Returns:
        The HTML file.
    """
    text, pictures = render_markdown(page, "pictures")
    for old in (out / "pictures").glob("*"):
        old.unlink()
    files = {"report.html": render_html(page).encode(), "report.md": text.encode()}
    for name, content in {**{f"pictures/{n}": c for n, c in pictures.items()}, **files}.items():
        with whole_file(out / name) as part:
            part.write_bytes(content)
    return out / "report.html"


@dataclass(frozen=True)
class Links:
    """Addresses of runs.

    Attributes:
        ui: Where ``mlflow ui`` answers.
        out: The report's folder, which folders of runs are given relative to.
    """

    ui: str
    out: Path

    def run(self, run: TrackedRun) -> str:
        """A run's page in MLflow."""
        return f"{self.ui}/#/experiments/{run.experiment_id}/runs/{run.run_id}"

    def runs(self, runs: Sequence[CompleteRun]) -> str | None:
        """The page of one run, or the one that compares several."""
        tracked = [run.tracked for run in runs]
        if len(tracked) < 2:
            return self.run(tracked[0]) if tracked else None
        ids = json.dumps([run.run_id for run in tracked], separators=(",", ":"))
        experiments = json.dumps(sorted({run.experiment_id for run in tracked}), separators=(",", ":"))
        return f"{self.ui}/#/compare-runs?runs={quote(ids)}&experiments={quote(experiments)}"

    def folder(self, run: TrackedRun) -> Cell:
        """A run's folder; without a link if it is not on this machine."""
        if run.folder is None or not run.folder.is_dir():
            return Cell(run.folder.name if run.folder else UNKNOWN)
        return Cell(run.folder.name, quote(os.path.relpath(run.folder, self.out.resolve())))


def build_page(
    tracked: Sequence[TrackedRun], runs: Sequence[CompleteRun], links: Links, uri: str | None
) -> Page:
    """The report.

    Args:
        tracked: All runs of the experiments.
        runs: Those that are complete.
        links: Addresses.
        uri: Tracking URI, for the histories of metrics.
    """
    trials = [run for run in runs if run.tracked.parent]
    data = groups_by_data([run for run in runs if not run.tracked.parent])
    filled = [table for name in choices("table") if (table := fill(name, _flat(data)))]
    parts: dict[str, Iterator[Block]] = {
        "Runs": chain(_overview(data, links), _unfinished(tracked, runs, links)),
        "Beside the papers": chain.from_iterable(_paper_table(table, links) for table in filled),
        "Over the rounds": _curves(data, links, uri),
        "Accuracy and bytes": _communication(data),
        "Clients apart": _spread(data, links),
        "Partitions": _partitions(data, links),
        "What detectors see": _sheets(data, links),
        "Privacy": _privacy(data, links),
        "Sweeps": _sweeps(tracked, trials, links),
        "Missing runs": _missing(filled),
    }
    sections = [Section(title, blocks) for title, part in parts.items() if (blocks := list(part))]
    names = list(dict.fromkeys(run.tracked.experiment for run in runs))
    return Page(
        f"Runs: {', '.join(names)}",
        f"Complete runs: {len(runs)}. Numbers link to their runs in MLflow ({links.ui}): "
        "means over seeds to the comparison of their runs. ± is the sample standard deviation over seeds.",
        sections,
    )


def _flat(data: Mapping[str, Sequence[RunGroup]]) -> list[CompleteRun]:
    return [run for groups in data.values() for group in groups for run in group.runs]


def _overview(data: Mapping[str, Sequence[RunGroup]], links: Links) -> Iterator[Block]:
    """One table a data set: one line a configuration, and under it one a seed."""
    for name, groups in data.items():
        metrics = [
            metric
            for metric in METRIC_TITLES
            if any(metric in run.result["last"] for group in groups for run in group.runs)
        ]
        first = groups[0].first.metric
        heads = ["method", "seed", "task", "backbone", "rounds", *map(metric_title, metrics)]
        heads += [f"worst client, {metric_title(first)}", "bytes up", "time", "files"]
        lines = []
        for group in groups:
            lines.append(_overview_line(group.label, group.runs, metrics, links, part=False))
            if len(group.runs) > 1:
                lines += [_overview_line(group.label, [r], metrics, links, part=True) for r in group.runs]
        notes = [
            "Metrics: mean over clients after the last round; in brackets after the best, which a run chooses by its "
            "first metric on the test set. Bytes: sent by all clients in all rounds. Time: of all rounds."
        ]
        yield Grid(name, heads, lines, notes, texts=4)


def _overview_line(
    label: str, runs: Sequence[CompleteRun], metrics: Sequence[str], links: Links, part: bool
) -> Line:
    url, one = links.runs(runs), runs[0]
    seeds = ", ".join(str(run.seed) for run in runs)

    def mean(pick: Callable[[CompleteRun], float], text: Callable[[float], str]) -> Cell:
        return Cell(text(statistics.mean(map(pick, runs))), url)

    client, value = _worst(runs, one.metric)
    cells = [
        Cell(f"seed {seeds}" if part else label, url),
        Cell(seeds),
        Cell(one.result["task"]),
        Cell(f"{one.result['backbone']['name']}, {one.result['backbone']['taken']}"),
        Cell(str(one.result["rounds"])),
        *(Cell(_last_and_best(runs, metric), url) for metric in metrics),
        Cell(f"{client}: {_metric(value)}", url) if value is not None else Cell(UNKNOWN),
        mean(lambda run: sum(run.result["bytes_up"]), lambda value: human_bytes(round(value))),
        mean(lambda run: sum(run.result["seconds_per_round"]), human_seconds),
        links.folder(one.tracked) if len(runs) == 1 else Cell(""),
    ]
    return Line(cells, part)


def _last_and_best(runs: Sequence[CompleteRun], metric: str) -> str:
    last, best = (
        [value for run in runs if (value := run.result[moment].get(metric, {}).get("mean")) is not None]
        for moment in ("last", "best")
    )
    if not last:
        return UNKNOWN
    text = _metric(statistics.mean(last))
    if len(last) > 1:
        text += f" ± {_metric(statistics.stdev(last))}"
    return f"{text} [{_metric(statistics.mean(best))}]" if best else text


def _worst(runs: Sequence[CompleteRun], metric: str) -> tuple[str, float | None]:
    """Client and value of the lowest value of a metric in the last round; of several seeds, of the worst."""
    values = [
        (value, f"client {client}" + (f", seed {run.seed}" if len(runs) > 1 else ""))
        for run in runs
        for client, value in _clients(run, metric).items()
    ]
    value, client = min(values, default=(None, ""))
    alike = len({value for value, _ in values}) == 1 and len(values) > 1
    return "all alike" if alike else client, value


def _clients(run: CompleteRun, metric: str) -> dict[str, float]:
    """Value by client after the last round, of those for which it is defined."""
    found = run.result["last"].get(metric, {}).get("per_client", {})
    return {client: value for client, value in found.items() if value is not None}


def _metric(value: float) -> str:
    """Shares with four decimals; counts with as many digits as they need."""
    if abs(value) <= 1:
        return f"{value:.4f}"
    return f"{value:.4g}" if abs(value) < 1e4 else f"{value:,.0f}"


def _unfinished(tracked: Sequence[TrackedRun], runs: Sequence[CompleteRun], links: Links) -> Iterator[Block]:
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


def _paper_table(filled: FilledTable, links: Links) -> Iterator[Block]:
    table, frame = filled.table, filled.frame()
    of_column = {
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
    present = {row for row, _ in filled.runs}
    blocks = [(table.title, list(table.rows)), (f"{table.title}: beyond the paper", list(table.beyond))]
    blocks = [(title, rows) for title, rows in blocks if present & {row.label for row in rows}]
    for title, rows in blocks:
        texts = results_table(table, rows, filled.columns, frame)
        lines = [
            Line(
                [
                    Cell(text, links.runs(filled.runs.get((row.label, of_column.get(head, "")), ())))
                    for head, text in zip(texts.columns, line, strict=True)
                ]
            )
            for row, line in zip(rows, texts.to_numpy().tolist(), strict=True)
        ]
        yield Grid(title, list(texts.columns), lines)
        costs = costs_table(table, [row for row in rows if row.label in present], frame)
        yield Grid(
            f"{title}: what it cost",
            list(costs.columns),
            [
                Line([Cell(text, links.runs(_of_row(filled, line[0]))) for text in line])
                for line in costs.to_numpy().tolist()
            ],
            [note for note in notes if note] if rows is blocks[-1][1] else (),
        )


def _of_row(filled: FilledTable, row: str) -> list[CompleteRun]:
    return [run for (label, _), runs in filled.runs.items() if label == row for run in runs]


def _curves(data: Mapping[str, Sequence[RunGroup]], links: Links, uri: str | None) -> Iterator[Block]:
    """The first metric of all runs, then the loss and the metric of each client (FedDyMem, Fig. 6, 7)."""
    for name, groups in data.items():
        first = groups[0].first.metric
        curves = {group.label: [_rounds(run, first) for run in group.runs] for group in groups}
        figure = lines_figure(curves, "round", metric_title(first), whole=True)
        alt = f"{metric_title(first)} over the rounds on {name}, one line a run: {', '.join(curves)}"
        yield Gallery([Picture(svg(figure), "svg", alt, "Mean over clients, one line a run.")], name)
        pictures = []
        for group in groups:
            run = group.first
            for metric, title in (("loss", "training loss"), (first, metric_title(first))):
                if history := _histories(run.tracked, metric, uri):
                    figure = curves_figure(history, title)
                    what = f"{group.label}, seed {run.seed}: {title} of each client"
                    pictures.append(Picture(svg(figure), "svg", what, what, links.run(run.tracked)))
        if pictures:
            yield Gallery(pictures)


def _histories(run: TrackedRun, metric: str, uri: str | None) -> dict[int, list[tuple[int, float]]]:
    found = {}
    for name in run.metrics:
        if match := re.fullmatch(rf"{re.escape(metric)}/client_(\d+)", name):
            found[int(match[1])] = metric_history(run.run_id, name, uri)
    return found


def _rounds(run: CompleteRun, metric: str) -> Curve:
    """Pairs (round, mean over clients)."""
    means = {int(number): values.get(metric) for number, values in run.result["metrics"].items()}
    return [(number, value) for number, value in sorted(means.items()) if value is not None]


def _communication(data: Mapping[str, Sequence[RunGroup]]) -> Iterator[Block]:
    pictures = []
    for name, groups in data.items():
        first = groups[0].first.metric
        curves = {group.label: [_sent(run, first) for run in group.runs] for group in groups}
        figure = lines_figure(curves, "sent by all clients so far (MB)", metric_title(first), whole=False)
        alt = f"{metric_title(first)} over bytes sent on {name}, one line a run: {', '.join(curves)}"
        silent = [group.label for group in groups if not any(group.first.result["bytes_up"])]
        caption = f"{name}: one line a run, one point an evaluation" + (
            f"; nothing is sent by {', '.join(silent)}" if silent else ""
        )
        pictures.append(Picture(svg(figure), "svg", alt, caption))
    if pictures:
        yield Gallery(pictures)


def _sent(run: CompleteRun, metric: str) -> Curve:
    """Pairs (megabytes sent by the end of a round, mean over clients)."""
    # Of several exchanges in a round the last counts.
    sent = dict(zip(run.result["exchanges"], accumulate(run.result["bytes_up"]), strict=True))
    return [(sent[int(number)] / 1e6, value) for number, value in _rounds(run, metric)]


def _spread(data: Mapping[str, Sequence[RunGroup]], links: Links) -> Iterator[Block]:
    for name, groups in data.items():
        first = groups[0].first.metric
        title = metric_title(first)
        values = {
            f"{group.label}, seed {run.seed}": (run, clients)
            for group in groups
            for run in group.runs
            if (clients := _clients(run, first))
        }
        if not values:
            continue
        lines = []
        for label, (run, clients) in values.items():
            url = links.run(run.tracked)
            low, high = (pick(clients, key=clients.__getitem__) for pick in (min, max))
            numbers = list(clients.values())
            texts = [
                str(len(numbers)),
                _metric(statistics.mean(numbers)),
                _metric(statistics.stdev(numbers)) if len(numbers) > 1 else UNKNOWN,
                *(
                    f"{f'client {client}' if clients[low] < clients[high] else 'all alike'}: {_metric(clients[client])}"
                    for client in (low, high)
                ),
                _metric(clients[high] - clients[low]),
            ]
            lines.append(Line([Cell(label, url), *(Cell(text, url) for text in texts)]))
        heads = ["run", "clients", "mean", "deviation", "worst client", "best client", "between them"]
        yield Grid(f"{name}, {title} after the last round", heads, lines)
        figure = spread_figure({label: clients for label, (_, clients) in values.items()}, title)
        alt = f"{title} of each client on {name}: one row a run, one dot a client, the worst client numbered"
        yield Gallery(
            [Picture(svg(figure), "svg", alt, f"{name}: one dot a client; bar: mean; number: worst client")]
        )


def _partitions(data: Mapping[str, Sequence[RunGroup]], links: Links) -> Iterator[Block]:
    """Each distinct partition once."""
    pictures: dict[str, Picture] = {}
    for name, groups in data.items():
        for group in groups:
            run = group.first
            partition, file = run.result["partition"], run.files / "figures" / "partition.png"
            held = json.dumps([name, partition["counts"], partition["stage_sizes"]])
            if held not in pictures and file.is_file():
                clients = len(partition["sizes"])
                caption = f"{name}: {partition['strategy']}, {clients} clients, seed {run.seed}"
                alt = f"Which of {len(partition['products'])} classes or products lie on which client, {caption}"
                pictures[held] = Picture(sheet(file), "webp", alt, caption, links.run(run.tracked))
    if pictures:
        yield Gallery(list(pictures.values()))


def _sheets(data: Mapping[str, Sequence[RunGroup]], links: Links) -> Iterator[Block]:
    pictures = [
        Picture(sheet(file), "webp", caption, caption, links.run(group.first.tracked))
        for name, groups in data.items()
        for group in groups
        for stem, title in _SHEETS.items()
        if (file := group.first.files / "figures" / f"{stem}.png").is_file()
        for caption in [f"{title}: {group.label} on {name}, seed {group.first.seed}"]
    ]
    if pictures:
        yield Gallery(pictures)


def _privacy(data: Mapping[str, Sequence[RunGroup]], links: Links) -> Iterator[Block]:
    """Numbers of what was attacked, and their pictures."""
    lines, pictures = [], []
    for name, groups in data.items():
        for group in groups:
            for run in group.runs:
                label, url = f"{group.label} on {name}, seed {run.seed}", links.run(run.tracked)
                for attack, values in _attacks(run):
                    for key, value in values.items():
                        text = f"{value:.4g}" if isinstance(value, float) else str(value)
                        lines.append(Line([Cell(label, url), Cell(attack), Cell(key), Cell(text, url)]))
                for stem, title in _ATTACKS.items():
                    if (file := run.files / "figures" / f"{stem}.png").is_file():
                        caption = f"{title}: {label}"
                        pictures.append(Picture(sheet(file), "webp", caption, caption, url))
    if lines:
        yield Grid("", ["run", "attack", "figure", "value"], lines, texts=3)
    if pictures:
        yield Gallery(pictures)


def _attacks(run: CompleteRun) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Name and single numbers of each attack on a run."""
    found: dict[str, Mapping[str, Any]] = {}
    if run.result.get("privacy"):
        found["while training"] = run.result["privacy"]
    for path in sorted((run.files / "privacy").glob("*.json")):
        found[path.stem] = json.loads(path.read_text())
    for attack, values in found.items():
        yield attack, {k: v for k, v in values.items() if isinstance(v, (int, float, str)) and k != "attack"}


def _sweeps(tracked: Sequence[TrackedRun], trials: Sequence[CompleteRun], links: Links) -> Iterator[Block]:
    """Each study: its trials with what they were asked to be, and its pictures."""
    for study in tracked:
        if "study" not in study.tags:
            continue
        own = [run for run in tracked if run.parent == study.run_id]
        results = {run.tracked.run_id: run for run in trials}
        asked = _differing(own)
        objectives = [key.removeprefix(_OBJECTIVE) for key in study.params if key.startswith(_OBJECTIVE)]
        lines = []
        for run in own:
            url, complete = links.run(run), results.get(run.run_id)
            values = [objective_value(complete.result, name) if complete else None for name in objectives]
            cells = [Cell(run.name, url), Cell(run.status.lower())]
            cells += [Cell(_short(run.params.get(key, UNKNOWN))) for key in asked]
            cells += [Cell(_metric(v), url) if v is not None else Cell(UNKNOWN) for v in values]
            lines.append(Line(cells))
        yield Grid(study.name, ["trial", "state", *asked, *objectives], lines, texts=2 + len(asked))
        pictures = [
            Picture(sheet(file), "webp", caption, caption, links.run(study))
            for file in sorted(study.folder.glob("figures/*.png") if study.folder else ())
            for caption in [f"{file.stem.replace('_', ' ')}: {study.name}"]
        ]
        if pictures:
            yield Gallery(pictures)


def _short(value: str) -> str:
    """A drawn number with four digits; anything else as it is."""
    return f"{float(value):.4g}" if re.fullmatch(r"\d*\.\d{5,}(e-?\d+)?|\d\.\d+e-?\d+", value) else value


def _differing(runs: Sequence[TrackedRun]) -> list[str]:
    """Parameters that are not the same in all runs."""
    keys = sorted({key for run in runs for key in run.params})
    return [key for key in keys if len({run.params.get(key) for run in runs}) > 1]


def _missing(filled: Sequence[FilledTable]) -> Iterator[Block]:
    exact = {table.name: table.exact for table in filled}
    pairs = [pair for table in filled for pair in table.beside]
    for name in choices("table"):
        pairs += missing(name, exact.get(name, ()))
    if pairs:
        yield Prose(
            [
                "DIR stands for the folder of the data. A command runs what is missing and resumes what was begun."
            ]
        )
        yield Commands(pairs)
