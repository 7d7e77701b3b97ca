"""Section of the report: metrics of single products, and their mean over products."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from lit_fedad.comparison.links import Links
from lit_fedad.comparison.runs import CompleteRun, GroupsByData
from lit_fedad.comparison.sections.numbers import format_metric
from lit_fedad.report.html import Block, Cell, Grid, Line
from lit_fedad.report.naming import METRIC_TITLES, metric_title
from lit_fedad.report.tables import UNKNOWN

_NOTE = (
    "Of each product: mean over clients after the last round, mean over seeds. A product without a normal or an"
    " anomalous test image has no value, and no part in the mean over products, in which all others count alike."
)


def product_tables(data: GroupsByData, links: Links) -> Iterator[Block]:
    """Tabulates each metric of each product after the last round, as tables of MVTec AD have it.

    Args:
        data: The runs.
        links: Addresses of the runs.

    Yields:
        A table for each data set with products: one line a metric of each group of runs.
    """
    for name, groups in data.items():
        products = list(
            dict.fromkeys(
                product
                for group in groups
                for run in group.runs
                for metric in METRIC_TITLES
                for product in run.per_product(metric)
            )
        )
        if not products:
            continue
        lines = [
            Line(
                [Cell(text, links.runs(group.runs)) for text in (group.label, metric_title(metric))]
                + [Cell(text, links.runs(group.runs)) for text in _texts(group.runs, metric, products)]
            )
            for group in groups
            for metric in METRIC_TITLES
            if any(run.per_product(metric) for run in group.runs)
        ]
        yield Grid(name, ["run", "metric", "mean of products", *products], lines, [_NOTE], texts=2)


def _texts(runs: Sequence[CompleteRun], metric: str, products: Sequence[str]) -> Iterator[str]:
    """Formats the mean over products, and the value of each, as means over runs."""
    by_run = [run.per_product(metric) for run in runs]
    means = [run.result["last"].get(metric, {}).get("product_mean") for run in runs]
    for values in (means, *([own.get(product) for own in by_run] for product in products)):
        known = [value for value in values if value is not None]
        yield format_metric(statistics.mean(known)) if known else UNKNOWN
