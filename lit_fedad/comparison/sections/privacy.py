"""Section of the report: attacks on runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from lit_fedad.comparison.links import Links
from lit_fedad.comparison.runs import CompleteRun, GroupsByData
from lit_fedad.experiment.run_folder import RunFolder
from lit_fedad.report.html import Block, Cell, Gallery, Grid, Line, Picture
from lit_fedad.report.run_figures import sheet

_FIGURES = {
    "lira": "Membership inference (LiRA)",
    "inversion": "Inversion",
    "distance_correlation": "Distance correlation",
}


def attacks(data: GroupsByData, links: Links) -> Iterator[Block]:
    """Tabulates the results of attacks on runs, and shows their figures.

    Args:
        data: The runs.
        links: Addresses of the runs.

    Yields:
        A table and a block of pictures, if a run was attacked.
    """
    lines, pictures = [], []
    for name, groups in data.items():
        for group in groups:
            for run in group.runs:
                label, url = f"{group.label} on {name}, seed {run.seed}", links.run(run.tracked)
                for attack, values in _results(run).items():
                    for key, value in values.items():
                        text = f"{value:.4g}" if isinstance(value, float) else str(value)
                        lines.append(Line([Cell(label, url), Cell(attack), Cell(key), Cell(text, url)]))
                for stem, title in _FIGURES.items():
                    if (file := run.files / "figures" / f"{stem}.png").is_file():
                        caption = f"{title}: {label}"
                        pictures.append(Picture(sheet(file), "webp", caption, caption, url))
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
