"""Figures of a run's partition, curves and communication."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

from lit_fedad.experiment.run import Run, RunCallback
from lit_fedad.experiment.run_data import Data
from lit_fedad.federation.round_report import RoundReport
from lit_fedad.report.figures import curves_figure, partition_figure, save_figure, stages_figure
from lit_fedad.report.naming import METRIC_TITLES, metric_title
from lit_fedad.report.run_figures import lines_figure

_NOT_DRAWN = ("f1_max", "p_ap", "pro_05", "spro", "aupimo")
"""Metrics without a figure, because their curves resemble those of other metrics."""


class History(RunCallback):
    """A callback that draws the partition and, after the last round, curves, unless ``evaluation.pictures`` is 0."""

    def on_run_start(self, run: Run) -> None:
        """Draws ``partition.png``."""
        if run.fabric.is_global_zero and run.config["evaluation"]["pictures"]:
            draw_partition(run.local, run.folder.path)

    def on_rounds_end(self, run: Run) -> None:
        """Draws a figure of each metric's curves, and ``communication.png``."""
        if run.fabric.is_global_zero and run.config["evaluation"]["pictures"]:
            draw_curves(run.federation.history, run.folder.path)
            metric = run.federation.evaluator.metrics[0]
            draw_communication(run.federation.history, metric, run.folder.path)


def draw_partition(data: Data, folder: Path) -> None:
    """Draws the numbers of images by client and class (FedDyMem Fig. 5), and by stage where data come in stages."""
    partition, images = data.partition, data.images
    if partition.stages is None:
        figure = partition_figure(partition.counts(images), images.categories)
    else:
        figure = stages_figure(partition.stage_counts(images), images.categories)
    save_figure(figure, folder / "figures" / "partition.png")


def draw_curves(history: Sequence[RoundReport], folder: Path) -> None:
    """Draws loss and metrics of each client over the rounds, except metrics that were never defined."""
    curves: dict[str, dict[int, list[tuple[int, float]]]] = {}
    names = [name for name in METRIC_TITLES if name not in _NOT_DRAWN]
    for report in history:
        values = {name: (report.metrics or {}).get(name, {}).get("per_client", {}) for name in names}
        values["loss"] = {c: scalars["loss"] for c, scalars in report.per_client.items() if "loss" in scalars}
        for name, by_client in values.items():
            for client, value in by_client.items():
                curves.setdefault(name, {}).setdefault(client, []).append((report.round, value))
    for name, by_client in curves.items():
        if not any(math.isfinite(value) for points in by_client.values() for _, value in points):
            continue
        figure = curves_figure(by_client, METRIC_TITLES.get(name, f"training {name}"))
        save_figure(figure, folder / "figures" / f"{name}.png")


def draw_communication(history: Sequence[RoundReport], metric: str, folder: Path) -> None:
    """Draws a metric over the bytes sent so far, unless no client sends anything."""
    sent = list(accumulate(sum(report.bytes_up.values()) for report in history))
    values = [(report.metrics or {}).get(metric, {}).get("mean", math.nan) for report in history]
    curve = [
        (bytes_ / 1e6, value) for bytes_, value in zip(sent, values, strict=True) if math.isfinite(value)
    ]
    if curve and curve[-1][0]:
        x_title = "sent by all clients by the end of a round (MB)"
        figure = lines_figure({"mean over clients": [curve]}, x_title, metric_title(metric), whole=False)
        save_figure(figure, folder / "figures" / "communication.png")
