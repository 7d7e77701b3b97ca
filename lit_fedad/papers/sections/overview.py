"""Section of the report: complete runs with their metrics and costs, and those that are not complete."""

import re
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence

from lit_fedad.papers.runs import CompleteRun, GroupsByData, Links
from lit_fedad.report.html import Block, Cell, Gallery, Grid, Line, Picture
from lit_fedad.report.naming import METRIC_TITLES, human_bytes, human_seconds, metric_title
from lit_fedad.report.run_figures import spread_figure, svg
from lit_fedad.report.tables import UNKNOWN
from lit_fedad.tracking.reading import TrackedRun


def format_metric(value: float) -> str:
    """Formats shares with four decimals, and counts with as many digits as they need.

    Example:
        >>> [format_metric(value) for value in (0.5, 12.0, 2_000_500.0)]
        ['0.5000', '12', '2,000,500']
    """
    if abs(value) <= 1:
        return f"{value:.4f}"
    return f"{value:.4g}" if abs(value) < 1e4 else f"{value:,.0f}"


def format_parameter(text: str) -> str:
    """Shortens a number with many digits to four; leaves any other text as it is.

    Example:
        >>> [format_parameter(text) for text in ("0.0013525517894", "2.66e-05", "median")]
        ['0.001353', '2.66e-05', 'median']
    """
    return f"{float(text):.4g}" if re.fullmatch(r"\d*\.\d{5,}(e-?\d+)?|\d\.\d+e-?\d+", text) else text


_DECIDED = ("miss_rate", "false_alarm_rate")  # first of the table, which is wider than a screen

_NOTE = (
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
        yield Grid(name, ["run", "metric", "mean of products", *products], lines, [_NOTE], texts=2)


def _product_texts(runs: Sequence[CompleteRun], metric: str, products: Sequence[str]) -> Iterator[str]:
    """Formats the mean over products, and the value of each, as means over runs."""
    by_run = [run.per_product(metric) for run in runs]
    means = [run.result["last"].get(metric, {}).get("product_mean") for run in runs]
    for values in (means, *([by_product.get(product) for by_product in by_run] for product in products)):
        defined = [value for value in values if value is not None]
        yield _of_seeds(format_metric(statistics.mean(defined)), defined, runs) if defined else UNKNOWN


def _of_seeds(text: str, defined: Sequence[float], runs: Sequence[CompleteRun]) -> str:
    """Adds to a mean of how many seeds it is, where the value is not defined for all."""
    return text if len(defined) == len(runs) else f"{text} ({len(defined)} of {len(runs)} seeds)"


def client_spread(data: GroupsByData, links: Links) -> Iterator[Block]:
    """Tabulates and draws the first metric of each client after the last round."""
    heads = ["run", "clients", "mean", "deviation", "worst client", "best client", "between them"]
    for name, groups in data.items():
        first = groups[0].first.first_metric
        title = metric_title(first)
        runs = {f"{group.label}, seed {run.seed}": run for group in groups for run in group.runs}
        values = {
            label: {run.names.title(int(client)): value for client, value in clients.items()}
            for label, run in runs.items()
            if (clients := run.per_client(first))
        }
        if not values:
            continue
        lines = []
        for label, clients in values.items():
            lines.append(Line.of([label, *_client_texts(clients)], links.run(runs[label].tracked)))
        yield Grid(f"{name}, {title} after the last round", heads, lines)
        alt = f"{title} of each client on {name}: one row a run, one dot a client, the worst client named"
        caption = f"{name}: one dot a client; bar: mean; name: worst client"
        yield Gallery([Picture(svg(spread_figure(values, title)), "svg", alt, caption)])


def _client_texts(clients: Mapping[str, float]) -> list[str]:
    """Formats number, mean, deviation, lowest and highest of the clients' values, and the span between them."""
    numbers = list(clients.values())
    low, high = (pick(clients, key=clients.__getitem__) for pick in (min, max))
    apart = clients[low] < clients[high]
    return [
        str(len(numbers)),
        format_metric(statistics.mean(numbers)),
        format_metric(statistics.stdev(numbers)) if len(numbers) > 1 else UNKNOWN,
        *(f"{client if apart else 'all alike'}: {format_metric(clients[client])}" for client in (low, high)),
        format_metric(clients[high] - clients[low]),
    ]


def complete_table(data: GroupsByData, links: Links) -> Iterator[Block]:
    """Tabulates complete runs, one table a data set: one line a configuration, and under it one line a seed."""
    for name, groups in data.items():
        runs = [run for group in groups for run in group.runs]
        first = groups[0].first.first_metric
        ordered = dict.fromkeys([first, *_DECIDED, *METRIC_TITLES])
        metrics = [metric for metric in ordered if any(run.mean(metric, "last") is not None for run in runs)]
        worst = [f"worst client, {metric_title(first)}"] if first in metrics else []
        heads = ["method", "seed", *map(metric_title, metrics), *worst]
        heads += ["bytes up", "time", "rounds", "task", "backbone", "files"]
        lines = []
        for group in groups:
            lines.append(_line(group.label, group.runs, metrics, links, part=False))
            if len(group.runs) > 1:
                lines += [_line(group.label, [run], metrics, links, part=True) for run in group.runs]
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


def _line(label: str, runs: Sequence[CompleteRun], metrics: Sequence[str], links: Links, part: bool) -> Line:
    url, one = links.runs(runs), runs[0]
    seeds = ", ".join(str(run.seed) for run in runs)

    def mean(pick: Callable[[CompleteRun], float], text: Callable[[float], str]) -> Cell:
        return Cell(text(statistics.mean(map(pick, runs))), url)

    worst = []
    if one.first_metric in metrics:
        client, value = _worst(runs, one.first_metric)
        worst = [Cell(UNKNOWN if value is None else f"{client}: {format_metric(value)}", url)]
    cells = [
        Cell(f"seed {seeds}" if part else label, url),
        Cell(seeds),
        *(Cell(_last_and_best(runs, metric), url) for metric in metrics),
        *worst,
        mean(lambda run: sum(run.result["bytes_up"]), human_bytes),
        mean(lambda run: sum(run.result["seconds_per_round"]), human_seconds),
        Cell(str(one.result["rounds"])),
        Cell(one.result["task"]),
        Cell(f"{one.result['backbone']['name']}, {one.result['backbone']['taken']}"),
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
    alike = len({value for value, _ in values}) == 1 and len(values) > 1
    return "all alike" if alike else client, value
