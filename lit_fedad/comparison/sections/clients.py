"""Section of the report: how far the clients of a run are apart."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping

from lit_fedad.comparison.links import Links
from lit_fedad.comparison.runs import CompleteRun, GroupsByData
from lit_fedad.comparison.sections.numbers import format_metric
from lit_fedad.report.html import Block, Cell, Gallery, Grid, Line, Picture
from lit_fedad.report.naming import metric_title
from lit_fedad.report.run_figures import spread_figure, svg
from lit_fedad.report.tables import UNKNOWN


def client_spread(data: GroupsByData, links: Links) -> Iterator[Block]:
    """Tabulates and draws the first metric of each client after the last round.

    Args:
        data: The runs.
        links: Addresses of the runs.

    Yields:
        A table and a figure for each data set on which the metric is defined for a client.
    """
    heads = ["run", "clients", "mean", "deviation", "worst client", "best client", "between them"]
    for name, groups in data.items():
        first = groups[0].first.first_metric
        title = metric_title(first)
        runs = {f"{group.label}, seed {run.seed}": run for group in groups for run in group.runs}
        values = {label: clients for label, run in runs.items() if (clients := _labelled(run, first))}
        if not values:
            continue
        lines = []
        for label, clients in values.items():
            url = links.run(runs[label].tracked)
            lines.append(Line([Cell(text, url) for text in (label, *_texts(clients))]))
        yield Grid(f"{name}, {title} after the last round", heads, lines)
        alt = f"{title} of each client on {name}: one row a run, one dot a client, the worst client named"
        caption = f"{name}: one dot a client; bar: mean; name: worst client"
        yield Gallery([Picture(svg(spread_figure(values, title)), "svg", alt, caption)])


def _labelled(run: CompleteRun, metric: str) -> dict[str, float]:
    """Returns a metric after the last round by what clients are called."""
    return {run.names.title(int(client)): value for client, value in run.per_client(metric).items()}


def _texts(clients: Mapping[str, float]) -> list[str]:
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
