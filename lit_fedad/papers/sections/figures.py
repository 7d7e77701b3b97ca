"""Sections of the report: figures, the papers' tables, sites, attacks and sweeps."""

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, chain
from typing import Any

from lit_fedad.evaluation.decisions import RATES
from lit_fedad.experiment.run_folder import RunFolder
from lit_fedad.papers.paper import FilledTable
from lit_fedad.papers.runs import CompleteRun, GroupsByData, Links, each_run
from lit_fedad.papers.sections.overview import format_metric, format_parameter
from lit_fedad.report.figures import curves_figure
from lit_fedad.report.html import Block, Cell, Gallery, Grid, Line, Picture, Prose
from lit_fedad.report.naming import metric_title, promised_text
from lit_fedad.report.run_figures import Curve, lines_figure, sheet, svg
from lit_fedad.report.tables import UNKNOWN
from lit_fedad.sites.status import status_rows
from lit_fedad.sweep.plan import objective_value
from lit_fedad.tracking.reading import TrackedRun, metric_history


def accuracy_over_rounds(data: GroupsByData, links: Links, uri: str | None) -> Iterator[Block]:
    """Draws the first metric of all runs over the rounds, then each client's loss and metric.

    The figures by client are those of FedDyMem Fig. 6 and FedDyMem Fig. 7.
    """
    for name, groups in data.items():
        first = groups[0].first.first_metric
        curves = {group.label: [_over_rounds(run, first) for run in group.runs] for group in groups}
        if not any(chain(*curves.values())):
            continue  # without a defect to test on there is nothing to draw
        figure = lines_figure(curves, "round", metric_title(first), whole=True)
        alt = f"{metric_title(first)} over the rounds on {name}, one line a run: {', '.join(curves)}"
        yield Gallery([Picture(svg(figure), "svg", alt, "Mean over clients, one line a run.")], name)
        pictures = []
        for group in groups:
            run = group.first
            for metric, title in (("loss", "training loss"), (first, metric_title(first))):
                if histories := _client_histories(run, metric, uri):
                    figure = curves_figure(histories, title, run.names)
                    what = f"{group.label}, seed {run.seed}: {title} of each client"
                    pictures.append(Picture(svg(figure), "svg", what, what, links.run(run.tracked)))
        if pictures:
            yield Gallery(pictures)


def accuracy_over_bytes(data: GroupsByData) -> Iterator[Block]:
    """Draws the first metric of all runs over the bytes that their clients sent."""
    pictures = []
    for name, groups in data.items():
        first = groups[0].first.first_metric
        curves = {group.label: [_over_bytes(run, first) for run in group.runs] for group in groups}
        if not any(chain(*curves.values())):
            continue
        figure = lines_figure(curves, "sent by all clients so far (MB)", metric_title(first), whole=False)
        alt = f"{metric_title(first)} over bytes sent on {name}, one line a run: {', '.join(curves)}"
        silent = [group.label for group in groups if not any(group.first.result["bytes_up"])]
        caption = f"{name}: one line a run, one point an evaluation" + (
            f"; nothing is sent by {', '.join(silent)}" if silent else ""
        )
        pictures.append(Picture(svg(figure), "svg", alt, caption))
    if pictures:
        yield Gallery(pictures)


def _client_histories(run: CompleteRun, metric: str, uri: str | None) -> dict[int, list[tuple[int, float]]]:
    histories = {}
    for name in run.tracked.metrics:
        client = run.names.number(name.removeprefix(f"clients/{metric}/"))
        if client is not None:
            histories[client] = metric_history(run.tracked.run_id, name, uri)
    return histories


def _over_rounds(run: CompleteRun, metric: str) -> Curve:
    """Lists pairs (round, mean over clients)."""
    means = {int(number): values.get(metric) for number, values in run.result["metrics"].items()}
    return [(number, value) for number, value in sorted(means.items()) if value is not None]


def _over_bytes(run: CompleteRun, metric: str) -> Curve:
    """Lists pairs (megabytes sent by the end of a round, mean over clients)."""
    # Of several exchanges in a round the last counts.
    sent = dict(zip(run.result["exchanges"], accumulate(run.result["bytes_up"]), strict=True))
    return [(sent[int(number)] / 1e6, value) for number, value in _over_rounds(run, metric)]


_NOTES = (
    "Mean over clients, of their own products and of foreign ones. Of a product: mean over the clients that hold it and"
    " over the others; in brackets the 95 % interval (Wilson) of as many images as the product has in the test set.",
)
_FIGURES = {
    "calibration": "Promised and seen false alarms, and misses",
    "scores": "Scores of each client beside its threshold",
}


def promises(data: GroupsByData, links: Links) -> Iterator[Block]:
    """Tabulates the rates of each run's decisions beside the promised rate, and shows the figures of the first runs."""
    heads = ["run, product", "promised", *map(metric_title, RATES)]
    for name, groups in data.items():
        runs = [(f"{group.label}, seed {run.seed}", run) for group in groups for run in group.runs]
        lines = [line for label, run in runs for line in _lines(label, run, links)]
        if lines:
            yield Grid(name, heads, lines, _NOTES)
    yield from _gallery(data, links, _FIGURES)


def _lines(label: str, run: CompleteRun, links: Links) -> Iterator[Line]:
    """Yields one line a promised rate, and under that of the shipped one a line a product."""
    url = links.run(run.tracked)
    for number, (alpha, judged) in enumerate(run.result.get("decisions", {}).items()):
        means = [judged.get(rate, {}).get("mean") for rate in RATES]
        rates = judged.get("promised")  # what was stored may lack it
        promised = promised_text([rates["lowest"], rates["highest"]]) if rates else alpha
        yield Line.of([label, promised, *map(_share, means)], url)
        sides = judged.get("products", {}) if number == 0 else {}
        for product in sides.get("own", {}):
            texts = [_of_product(sides.get(side, {}).get(product, {})) for side in ("own", "foreign")]
            yield Line.of([product, promised, *chain(*texts)], url, part=True)


def _of_product(rate: Mapping[str, Any]) -> tuple[str, str]:
    """Formats both rates of a product with their intervals."""
    alarms = _with_interval(rate.get("false_alarm_rate"), rate.get("interval"))
    return alarms, _with_interval(rate.get("miss_rate"), rate.get("miss_interval"))


def _with_interval(value: float | None, interval: list[float] | None) -> str:
    if value is None or interval is None or None in interval:
        return _share(value)
    return f"{_share(value)} ({' to '.join(map(_share, interval))})"


def _share(value: float | None) -> str:
    return UNKNOWN if value is None else format_metric(value)


_SHEETS = {"heatmaps": "Heatmaps", "knowledge": "Condensed images", "representations": "Representations"}


def partitions(data: GroupsByData, links: Links) -> Iterator[Block]:
    """Shows each distinct partition once."""
    pictures: dict[str, Picture] = {}
    for name, groups in data.items():
        for group in groups:
            run = group.first
            partition, file = run.result["partition"], run.files / "figures" / "partition.png"
            content = json.dumps([name, partition["counts"], partition["stage_sizes"]])
            if content not in pictures and file.is_file():
                clients = len(partition["sizes"])
                caption = f"{name}: {partition['strategy']}, {clients} clients, seed {run.seed}"
                alt = f"Which of {len(partition['products'])} classes or products lie on which client, {caption}"
                pictures[content] = Picture(sheet(file), "webp", alt, caption, links.run(run.tracked))
    if pictures:
        yield Gallery(list(pictures.values()))


def run_sheets(data: GroupsByData, links: Links) -> Iterator[Block]:
    """Shows heatmaps, condensed images and representations of the first run of each group."""
    yield from _gallery(data, links, _SHEETS)


def _gallery(data: GroupsByData, links: Links, titles: Mapping[str, str]) -> Iterator[Block]:
    """Shows figures of the first run of each group, given by their titles by file."""
    pictures = [
        picture
        for name, groups in data.items()
        for group in groups
        for picture in run_pictures(
            group.first, f"{group.label} on {name}, seed {group.first.seed}", links, titles
        )
    ]
    if pictures:
        yield Gallery(pictures)


def run_pictures(run: CompleteRun, label: str, links: Links, titles: Mapping[str, str]) -> Iterator[Picture]:
    """Yields the figures that a run has drawn."""
    for stem, title in titles.items():
        if (file := run.files / "figures" / f"{stem}.png").is_file():
            caption = f"{title}: {label}"
            yield Picture(sheet(file), "webp", caption, caption, links.run(run.tracked))


_ATTACKS = {
    "lira": "Membership inference (LiRA)",
    "inversion": "Inversion",
    "distance_correlation": "Distance correlation",
}


def attacks(data: GroupsByData, links: Links) -> Iterator[Block]:
    """Tabulates the results of attacks on runs, and shows their figures; names files that cannot be read."""
    lines, pictures, damaged = list[Line](), list[Picture](), list[str]()
    for label, run in each_run(data):
        url = links.run(run.tracked)
        for attack, values in _results(run, damaged).items():
            for key, value in values.items():
                text = f"{value:.4g}" if isinstance(value, float) else str(value)
                lines.append(Line([Cell(label, url), Cell(attack), Cell(key), Cell(text, url)]))
        pictures += run_pictures(run, label, links, _ATTACKS)
    if lines:
        yield Grid("", ["run", "attack", "figure", "value"], lines, texts=3)
    if damaged:
        yield Prose(damaged)
    if pictures:
        yield Gallery(pictures)


def _results(run: CompleteRun, damaged: list[str]) -> dict[str, dict[str, Any]]:
    """Reads the single numbers and texts of each attack on a run, by the name of the attack.

    `damaged` takes a line about each file that cannot be read.
    """
    results: dict[str, Mapping[str, Any]] = {}
    if run.result.get("privacy"):
        results["while training"] = run.result["privacy"]
    results |= RunFolder(run.files).attacks(damaged)
    return {
        attack: {k: v for k, v in values.items() if isinstance(v, (int, float, str)) and k != "attack"}
        for attack, values in results.items()
    }


def site_tables(data: GroupsByData, links: Links) -> Iterator[Block]:
    """Tabulates the sites of each federation, and its failures and refusals with their causes."""
    sites, troubles, heads = [], [], list[str]()
    for label, run in each_run(data):
        url, status = links.run(run.tracked), run.result.get("status") or {}
        for row in status_rows(status):
            heads = list(row)
            sites.append(Line.of([label, *row.values()], url))
        for site, entry in status.items():
            troubles += [Line.of([label, site, line]) for line in entry["troubles"]]
    if sites:
        notes = ["Time: from order to answer. Bytes: of the messages of all exchanges, of refused ones too."]
        yield Grid("", ["run", *heads], sites, notes, texts=3)
    if troubles:
        yield Grid("Failures and refusals", ["run", "site", "cause"], troubles, texts=3)


_OBJECTIVE = "objectives."  # prefix among the parameters of a study


def sweeps(tracked: Sequence[TrackedRun], trials: Sequence[CompleteRun], links: Links) -> Iterator[Block]:
    """Tabulates the trials of each study with their parameters and objectives, and shows the study's figures."""
    results = {trial.tracked.run_id: trial.result for trial in trials}
    for study in tracked:
        if "study" not in study.tags:
            continue
        runs = [run for run in tracked if run.parent == study.run_id]
        keys = sorted({key for run in runs for key in run.params})
        parameters = [key for key in keys if len({run.params.get(key) for run in runs}) > 1]
        objectives = [key.removeprefix(_OBJECTIVE) for key in study.params if key.startswith(_OBJECTIVE)]
        lines = []
        for run in runs:
            url, result = links.run(run), results.get(run.run_id)
            values = [objective_value(result, name) if result else None for name in objectives]
            cells = [Cell(run.name, url), Cell(run.status.lower())]
            cells += [Cell(format_parameter(run.params.get(key, UNKNOWN))) for key in parameters]
            cells += [Cell(format_metric(v), url) if v is not None else Cell(UNKNOWN) for v in values]
            lines.append(Line(cells))
        heads = ["trial", "state", *parameters, *objectives]
        yield Grid(study.name, heads, lines, texts=2 + len(parameters))
        pictures = [
            Picture(sheet(file), "webp", caption, caption, links.run(study))
            for file in sorted(study.folder.glob("figures/*.png") if study.folder else ())
            for caption in [f"{file.stem.replace('_', ' ')}: {study.name}"]
        ]
        if pictures:
            yield Gallery(pictures)


def paper_tables(tables: Sequence[FilledTable], links: Links) -> Iterator[Block]:
    """Tabulates each paper's numbers beside those of our runs, and what our runs cost.

    Yields:
        For the rows of each paper, and for rows beyond it: a table of results and one of costs. A table without a
        number of the paper for our data is left out.
    """
    for filled in tables:
        if any(key in row.paper for row in filled.table.rows for key in filled.columns.values()):
            yield from filled.grids(links)
