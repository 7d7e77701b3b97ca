"""Section of the report: what the coordinators of real sites saw of each, and what went wrong."""

from __future__ import annotations

from collections.abc import Iterator

from lit_fedad.comparison.links import Links
from lit_fedad.comparison.runs import GroupsByData
from lit_fedad.report.html import Block, Cell, Grid, Line
from lit_fedad.sites.status import status_rows


def site_tables(data: GroupsByData, links: Links) -> Iterator[Block]:
    """Tabulates the sites of each federation, and its failures and refusals with their causes.

    Args:
        data: The runs.
        links: Addresses of the runs.

    Yields:
        A table of sites, and one of troubles, if there are any.
    """
    sites, troubles, heads = [], [], list[str]()
    for name, groups in data.items():
        for group in groups:
            for run in group.runs:
                label, url = f"{group.label} on {name}, seed {run.seed}", links.run(run.tracked)
                status = run.result.get("status") or {}
                for row in status_rows(status):
                    heads = list(row)
                    sites.append(Line([Cell(text, url) for text in (label, *row.values())]))
                for site, own in status.items():
                    troubles += [
                        Line([Cell(text) for text in (label, site, line)]) for line in own["troubles"]
                    ]
    if sites:
        notes = ["Time: from order to answer. Bytes: of messages that were merged."]
        yield Grid("", ["run", *heads], sites, notes, texts=3)
    if troubles:
        yield Grid("Failures and refusals", ["run", "site", "cause"], troubles, texts=3)
