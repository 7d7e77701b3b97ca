"""Sections of the report: figures that runs drew themselves, of their partition and of what they detect."""

from __future__ import annotations

import json
from collections.abc import Iterator

from lit_fedad.comparison.links import Links
from lit_fedad.comparison.runs import GroupsByData
from lit_fedad.report.html import Block, Gallery, Picture
from lit_fedad.report.run_figures import sheet

_SHEETS = {"heatmaps": "Heatmaps", "knowledge": "Condensed images", "representations": "Representations"}


def partitions(data: GroupsByData, links: Links) -> Iterator[Block]:
    """Shows each distinct partition once.

    Args:
        data: The runs.
        links: Addresses of the runs.

    Yields:
        One block of pictures, if there are any.
    """
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
    """Shows heatmaps, condensed images and representations of the first run of each group.

    Args:
        data: The runs.
        links: Addresses of the runs.

    Yields:
        One block of pictures, if there are any.
    """
    pictures = [
        Picture(sheet(file), "webp", caption, caption, links.run(group.first.tracked))
        for name, groups in data.items()
        for group in groups
        for stem, title in _SHEETS.items()
        if (file := group.first.files / "figures" / f"{stem}.png").is_file()
        for caption in [f"{title}: {group.label} on {name}, seed {group.first.seed}"]
    ]
    if pictures:
        yield Gallery(pictures)
