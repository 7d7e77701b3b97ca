"""Sections of the report: runs with their metrics and costs, figures, sites and attacks."""

import json
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate, chain
from typing import Any

from lit_fedad.core.errors import UserError
from lit_fedad.evaluation.decisions import RATES
from lit_fedad.experiment.run_folder import RunFolder
from lit_fedad.papers.runs import CompleteRun, GroupsByData, Links, by_first_metric, each_run
from lit_fedad.report.figures import curves_figure
from lit_fedad.report.html import Block, Cell, Gallery, Grid, Line, Picture, Prose
from lit_fedad.report.naming import METRIC_TITLES, human_bytes, human_seconds, metric_title, promised_text
from lit_fedad.report.run_figures import Curve, lines_figure, sheet, svg
from lit_fedad.report.tables import UNKNOWN
from lit_fedad.sites.status import status_rows
from lit_fedad.tracking.reading import TrackedRun, metric_history


def format_metric(value: float) -> str:
    """Formats shares with four decimals, and counts with as many digits as they need.

    Example:
        >>> [format_metric(value) for value in (0.5, 12.0, 2_000_500.0)]
        ['0.5000', '12', '2,000,500']
    """
    if abs(value) <= 1:
        return f"{value:.4f}"
    return f"{value:.4g}" if abs(value) < 1e4 else f"{value:,.0f}"


_DECISION_RATES = ("miss_rate", "false_alarm_rate")  # first in the table, which is wider than a screen

_PRODUCT_NOTE = (
    "Of each product: mean over clients after the last round, mean over seeds. A product that has no value, as the"
    " AUROC of one without a normal or an anomalous test image, has no part in the mean over products, in which all"
    " others count alike."
)


def product_tables(data: GroupsByData, links: Links) -> Iterator[Block]:
    """Tabulates each metric of each product after the last round, as tables of MVTec AD have it."""
    for name, groups in data.items():
        runs = [run for group in groups for run in group.runs]
        measured = [run.per_product(metric) for run in runs for metric in METRIC_TITLES]
        products = list(dict.fromkeys(product for values in measured for product in values))
        if not products:
            continue
        lines = [
            Line.of(
                [group.label, metric_title(metric), *_product_texts(group.runs, metric, products)],
                links.runs(group.runs),
            )
            for group in groups
            for metric in METRIC_TITLES
            if any(run.per_product(metric) for run in group.runs)
        ]
        yield Grid(name, ["run", "metric", "mean of products", *products], lines, [_PRODUCT_NOTE], texts=2)


def _product_texts(runs: Sequence[CompleteRun], metric: str, products: Sequence[str]) -> Iterator[str]:
    """Formats the mean over products, and the value of each, as means over runs."""
    by_run = [run.per_product(metric) for run in runs]
    means = [run.result["last"].get(metric, {}).get("product_mean") for run in runs]
    for values in (means, *([by_product.get(product) for by_product in by_run] for product in products)):
        defined = [value for value in values if value is not None]
        yield _of_seeds(format_metric(statistics.mean(defined)), defined, runs) if defined else UNKNOWN


def _of_seeds(text: str, defined: Sequence[float], runs: Sequence[CompleteRun]) -> str:
    """Adds the number of seeds to the text of a mean that is not defined for all runs."""
    return text if len(defined) == len(runs) else f"{text} ({len(defined)} of {len(runs)} seeds)"


def complete_table(data: GroupsByData, links: Links) -> Iterator[Block]:
    """Tabulates complete runs, one table a data set: one line a configuration, and under it one line a seed."""
    for name, groups in data.items():
        runs = [run for group in groups for run in group.runs]
        first = groups[0].first.first_metric
        ordered = dict.fromkeys([first, *_DECISION_RATES, *METRIC_TITLES])
        metrics = [metric for metric in ordered if any(run.mean(metric, "last") is not None for run in runs)]
        worst = [f"worst client, {metric_title(first)}"] if first in metrics else []
        heads = ["method", "seed", *map(metric_title, metrics), *worst]
        heads += ["bytes up", "time", "rounds", "task", "backbone", "files"]
        lines = []
        for group in groups:
            lines.append(_run_line(group.label, group.runs, metrics, first, links, part=False))
            if len(group.runs) > 1:
                lines += [
                    _run_line(group.label, [run], metrics, first, links, part=True) for run in group.runs
                ]
        notes = [
            "Metrics: mean over clients after the last round; in brackets after the best, which a run chooses by its "
            "first metric on the test set. Bytes: sent by all clients in all rounds. Time: of all rounds, without "
            "evaluation."
        ]
        yield Grid(name, heads, lines, notes, texts=2)


def incomplete_table(
    tracked: Sequence[TrackedRun], runs: Sequence[CompleteRun], links: Links
) -> Iterator[Block]:
    """Tabulates runs that are not complete, without studies and their trials."""
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


def _run_line(
    label: str, runs: Sequence[CompleteRun], metrics: Sequence[str], worst_of: str, links: Links, part: bool
) -> Line:
    url, first = links.runs(runs), runs[0]
    seeds = ", ".join(str(run.seed) for run in runs)

    def mean(pick: Callable[[CompleteRun], float], text: Callable[[float], str]) -> Cell:
        return Cell(text(statistics.mean(map(pick, runs))), url)

    worst = []
    if worst_of in metrics:
        client, value = _worst(runs, worst_of)
        worst = [Cell(UNKNOWN if value is None else f"{client}: {format_metric(value)}", url)]
    cells = [
        Cell(f"seed {seeds}" if part else label, url),
        Cell(seeds),
        *(Cell(_last_and_best(runs, metric), url) for metric in metrics),
        *worst,
        mean(lambda run: sum(run.result["bytes_up"]), human_bytes),
        mean(lambda run: sum(run.result["seconds_per_round"]), human_seconds),
        Cell(str(first.result["rounds"])),
        Cell(first.result["task"]),
        Cell(f"{first.result['backbone']['name']}, {first.result['backbone']['taken']}"),
        links.folder(first.tracked) if len(runs) == 1 else Cell(""),
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
    text += f" [{format_metric(statistics.mean(best))}]" if best else ""
    return _of_seeds(text, last, runs)


def _worst(runs: Sequence[CompleteRun], metric: str) -> tuple[str, float | None]:
    """Finds client and value of the lowest value of a metric after the last round, over all seeds."""
    values = [
        (value, run.names.title(int(client)) + (f", seed {run.seed}" if len(runs) > 1 else ""))
        for run in runs
        for client, value in run.per_client(metric).items()
    ]
    value, client = min(values, default=(None, ""))
    all_equal = len({value for value, _ in values}) == 1 and len(values) > 1
    return "all alike" if all_equal else client, value


def accuracy_over_rounds(data: GroupsByData, links: Links, uri: str | None) -> Iterator[Block]:
    """Draws the first metric of runs over the rounds, then each client's loss and metric.

    The figures by client are those of FedDyMem Fig. 6 and FedDyMem Fig. 7.
    """
    for name, first, groups in by_first_metric(data):
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
                    caption = f"{group.label}, seed {run.seed}: {title} of each client"
                    pictures.append(Picture(svg(figure), "svg", caption, caption, links.run(run.tracked)))
        if pictures:
            yield Gallery(pictures)


def accuracy_over_bytes(data: GroupsByData) -> Iterator[Block]:
    """Draws the first metric of all runs over the bytes that their clients sent."""
    pictures = []
    for name, first, groups in by_first_metric(data):
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


_DECISION_NOTES = (
    "Mean over clients, of their own products and of foreign ones. Of a product: mean over the clients that hold it and"
    " over the others; in brackets the 95 % interval (Wilson) of as many images as the product has in the test set.",
)
_DECISION_FIGURES = {
    "calibration": "Promised and seen false alarms, and misses",
    "scores": "Scores of each client beside its threshold",
}


def promises(data: GroupsByData, links: Links) -> Iterator[Block]:
    """Tabulates the rates of each run's decisions beside the promised rate, and shows the figures of the first runs."""
    heads = ["run, product", "promised", *map(metric_title, RATES)]
    for name, groups in data.items():
        runs = [(f"{group.label}, seed {run.seed}", run) for group in groups for run in group.runs]
        lines = [line for label, run in runs for line in _decision_lines(label, run, links)]
        if lines:
            yield Grid(name, heads, lines, _DECISION_NOTES)
    yield from _gallery(data, links, _DECISION_FIGURES)


def _decision_lines(label: str, run: CompleteRun, links: Links) -> Iterator[Line]:
    """Yields one line for each promised rate, and below that of the shipped rate one for each product."""
    url = links.run(run.tracked)
    for number, judged in enumerate(run.result.get("decisions", {}).values()):
        means = [judged.get(rate, {}).get("mean") for rate in RATES]
        promised = promised_text([judged["promised"]["lowest"], judged["promised"]["highest"]])
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


_RUN_SHEETS = {"heatmaps": "Heatmaps", "knowledge": "Condensed images", "representations": "Representations"}


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
    yield from _gallery(data, links, _RUN_SHEETS)


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


_ATTACK_FIGURES = {
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
        pictures += run_pictures(run, label, links, _ATTACK_FIGURES)
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
    for attack in ("dcor", "inversion", "lira"):
        try:
            results[attack] = RunFolder(run.files).attack(attack) or {}
        except UserError as error:
            damaged.append(str(error))
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
