"""Sections of the report: metrics over the rounds and over the bytes that clients sent."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate

from lit_fedad.comparison.links import Links
from lit_fedad.comparison.runs import CompleteRun, GroupsByData
from lit_fedad.report.figures import curves_figure
from lit_fedad.report.html import Block, Gallery, Picture
from lit_fedad.report.naming import metric_title
from lit_fedad.report.run_figures import Curve, lines_figure, svg
from lit_fedad.tracking.reading import metric_history


def accuracy_over_rounds(data: GroupsByData, links: Links, uri: str | None) -> Iterator[Block]:
    """Draws the first metric of all runs over the rounds, then each client's loss and metric.

    The figures by client are those of FedDyMem Fig. 6 and FedDyMem Fig. 7.

    Args:
        data: The runs.
        links: Addresses of the runs.
        uri: Tracking URI, for the histories of clients.

    Yields:
        Figures, one block a data set and one for its clients.
    """
    for name, groups in data.items():
        first = groups[0].first.first_metric
        curves = {group.label: [_over_rounds(run, first) for run in group.runs] for group in groups}
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
    """Draws the first metric of all runs over the bytes that their clients sent.

    Args:
        data: The runs.

    Yields:
        One block with a figure for each data set.
    """
    pictures = []
    for name, groups in data.items():
        first = groups[0].first.first_metric
        curves = {group.label: [_over_bytes(run, first) for run in group.runs] for group in groups}
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
        client = run.names.number(name.removeprefix(f"{metric}/client_"))
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
