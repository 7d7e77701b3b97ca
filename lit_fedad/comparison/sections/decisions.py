"""Section of the report: promised false alarms beside those that were seen, misses, and scores beside thresholds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from lit_fedad.comparison.links import Links
from lit_fedad.comparison.runs import CompleteRun, GroupsByData
from lit_fedad.comparison.sections.numbers import format_metric
from lit_fedad.report.html import Block, Cell, Gallery, Grid, Line, Picture
from lit_fedad.report.naming import metric_title
from lit_fedad.report.run_figures import sheet
from lit_fedad.report.tables import UNKNOWN

_RATES = ("false_alarm_rate", "miss_rate", "false_alarm_rate_foreign", "miss_rate_foreign")
_NOTES = (
    "Mean over clients, of their own products and of foreign ones. Of a product: mean over the clients that hold it and"
    " over the others; in brackets the 95 % interval (Wilson) of as many images as the product has in the test set.",
)
_FIGURES = {
    "calibration": "Promised and seen false alarms, and misses",
    "scores": "Scores of each client beside its threshold",
}


def promises(data: GroupsByData, links: Links) -> Iterator[Block]:
    """Tabulates the rates of each run's decisions beside the promised rate, and shows the figures of the first runs.

    Args:
        data: The runs.
        links: Addresses of the runs.

    Yields:
        A table for each data set with decisions, and one block of pictures, if there are any.
    """
    heads = ["run, product", "promised", *map(metric_title, _RATES)]
    for name, groups in data.items():
        lines = [
            line
            for group in groups
            for run in group.runs
            for line in _lines(f"{group.label}, seed {run.seed}", run, links)
        ]
        if lines:
            yield Grid(name, heads, lines, _NOTES)
    pictures = [
        Picture(sheet(file), "webp", caption, caption, links.run(group.first.tracked))
        for name, groups in data.items()
        for group in groups
        for stem, title in _FIGURES.items()
        if (file := group.first.files / "figures" / f"{stem}.png").is_file()
        for caption in [f"{title}: {group.label} on {name}, seed {group.first.seed}"]
    ]
    if pictures:
        yield Gallery(pictures)


def _lines(label: str, run: CompleteRun, links: Links) -> Iterator[Line]:
    """Yields one line a promised rate, and under that of the shipped one a line a product."""
    url = links.run(run.tracked)
    for number, (alpha, judged) in enumerate(run.result.get("decisions", {}).items()):
        means = [judged.get(rate, {}).get("mean") for rate in _RATES]
        yield Line([Cell(text, url) for text in (label, alpha, *map(_share, means))])
        sides = judged.get("products", {}) if number == 0 else {}
        for product in sides.get("own", {}):
            texts = [_of_product(sides.get(side, {}).get(product, {})) for side in ("own", "foreign")]
            cells = [Cell(text, url) for pair in texts for text in pair]
            yield Line([Cell(product, url), Cell(alpha, url), *cells], part=True)


def _of_product(rate: Mapping[str, Any]) -> tuple[str, str]:
    """Formats both rates of a product with their intervals."""
    alarms, misses = (
        (rate.get("false_alarm_rate"), rate.get("interval")),
        (rate.get("miss_rate"), rate.get("miss_interval")),
    )
    return _with_interval(*alarms), _with_interval(*misses)


def _with_interval(value: float | None, interval: list[float] | None) -> str:
    if value is None or interval is None or None in interval:
        return _share(value)
    return f"{_share(value)} ({' to '.join(map(_share, interval))})"


def _share(value: float | None) -> str:
    return UNKNOWN if value is None else format_metric(value)
