"""Section of the report: studies and their trials."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from lit_fedad.comparison.links import Links
from lit_fedad.comparison.runs import CompleteRun
from lit_fedad.comparison.sections.numbers import format_metric, format_parameter
from lit_fedad.report.html import Block, Cell, Gallery, Grid, Line, Picture
from lit_fedad.report.run_figures import sheet
from lit_fedad.report.tables import UNKNOWN
from lit_fedad.sweep.objective import objective_value
from lit_fedad.tracking.reading import TrackedRun

_OBJECTIVE = "objectives."  # prefix among the parameters of a study


def sweeps(tracked: Sequence[TrackedRun], trials: Sequence[CompleteRun], links: Links) -> Iterator[Block]:
    """Tabulates the trials of each study with their parameters and objectives, and shows the study's figures.

    Args:
        tracked: All runs, studies and trials among them.
        trials: The complete trials.
        links: Addresses of the runs.

    Yields:
        For each study a table, and a block of pictures if it has any.
    """
    results = {trial.tracked.run_id: trial.result for trial in trials}
    for study in tracked:
        if "study" not in study.tags:
            continue
        own = [run for run in tracked if run.parent == study.run_id]
        parameters = _differing(own)
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


def _differing(runs: Sequence[TrackedRun]) -> list[str]:
    """Names the parameters that are not the same in all runs."""
    keys = sorted({key for run in runs for key in run.params})
    return [key for key in keys if len({run.params.get(key) for run in runs}) > 1]
