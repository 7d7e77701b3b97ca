"""Sections of the report: the papers' tables beside our runs, and the commands for the runs that they lack."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lit_fedad.experiment.run_folder import RunFolder
from lit_fedad.papers.paper import FilledTable, missing
from lit_fedad.papers.runs import CompleteRun, GroupsByData, Links, each_run
from lit_fedad.papers.sections.figures import run_pictures
from lit_fedad.papers.sections.overview import format_metric, format_parameter
from lit_fedad.report.html import Block, Cell, Commands, Gallery, Grid, Line, Picture, Prose
from lit_fedad.report.run_figures import sheet
from lit_fedad.report.tables import UNKNOWN
from lit_fedad.sites.status import status_rows
from lit_fedad.sweep.plan import objective_value
from lit_fedad.tracking.reading import TrackedRun

_FIGURES = {
    "lira": "Membership inference (LiRA)",
    "inversion": "Inversion",
    "distance_correlation": "Distance correlation",
}


def attacks(data: GroupsByData, links: Links) -> Iterator[Block]:
    """Tabulates the results of attacks on runs, and shows their figures."""
    lines, pictures = list[Line](), list[Picture]()
    for label, run in each_run(data):
        url = links.run(run.tracked)
        for attack, values in _results(run).items():
            for key, value in values.items():
                text = f"{value:.4g}" if isinstance(value, float) else str(value)
                lines.append(Line([Cell(label, url), Cell(attack), Cell(key), Cell(text, url)]))
        pictures += run_pictures(run, label, links, _FIGURES)
    if lines:
        yield Grid("", ["run", "attack", "figure", "value"], lines, texts=3)
    if pictures:
        yield Gallery(pictures)


def _results(run: CompleteRun) -> dict[str, dict[str, Any]]:
    """Reads the single numbers and texts of each attack on a run, by the name of the attack."""
    found: dict[str, Mapping[str, Any]] = {}
    if run.result.get("privacy"):
        found["while training"] = run.result["privacy"]
    found |= RunFolder(run.files).attacks()
    return {
        attack: {k: v for k, v in values.items() if isinstance(v, (int, float, str)) and k != "attack"}
        for attack, values in found.items()
    }


def site_tables(data: GroupsByData, links: Links) -> Iterator[Block]:
    """Tabulates the sites of each federation, and its failures and refusals with their causes."""
    sites, troubles, heads = [], [], list[str]()
    for label, run in each_run(data):
        url, status = links.run(run.tracked), run.result.get("status") or {}
        for row in status_rows(status):
            heads = list(row)
            sites.append(Line.of([label, *row.values()], url))
        for site, own in status.items():
            troubles += [Line.of([label, site, line]) for line in own["troubles"]]
    if sites:
        notes = ["Time: from order to answer. Bytes: of messages that were merged."]
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
        own = [run for run in tracked if run.parent == study.run_id]
        keys = sorted({key for run in own for key in run.params})
        parameters = [key for key in keys if len({run.params.get(key) for run in own}) > 1]
        objectives = [key.removeprefix(_OBJECTIVE) for key in study.params if key.startswith(_OBJECTIVE)]
        lines = []
        for run in own:
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


def missing_runs(names: Sequence[str], tables: Sequence[FilledTable]) -> Iterator[Block]:
    """Lists the commands for all runs that tables lack."""
    exact = {table.name: table.exact for table in tables}
    pairs = [pair for name in names for pair in missing(name, exact.get(name, ()))]
    if pairs:
        yield Prose(
            ["DIR is the folder of the data. A command runs what is missing and resumes what was begun."]
        )
        yield Commands(pairs)
