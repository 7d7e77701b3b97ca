"""The pictures of a run: who holds what, how it went, what the detector sees."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path

import torch
from lightning.fabric import Fabric

from lit_fedad.contracts import Client
from lit_fedad.data.sample import ImageSet
from lit_fedad.evaluation.predict import image_scores, predict_batch
from lit_fedad.experiment.build import Data
from lit_fedad.federation.loop import Federation, RoundReport
from lit_fedad.report.communication import Point, communication_figure
from lit_fedad.report.console import METRIC_TITLES, metric_title
from lit_fedad.report.figures import curves_figure, partition_figure, save_figure, score_figure, stages_figure
from lit_fedad.report.heatmaps import Case, heatmap_sheet, pick_cases


def draw_partition(data: Data, folder: Path) -> None:
    """Who holds how much of what (FedDyMem, Fig. 5), and when where images come task after task."""
    partition, images = data.partition, data.images
    if partition.stages is None:
        figure = partition_figure(partition.counts(images), images.categories)
    else:
        figure = stages_figure(partition.stage_counts(images), images.categories)
    save_figure(figure, folder / "figures" / "partition.png")


def draw_curves(history: Sequence[RoundReport], folder: Path) -> None:
    """Loss and metrics of each client over the rounds."""
    curves: dict[str, dict[int, list[tuple[int, float]]]] = {}
    for report in history:
        values = {name: (report.metrics or {}).get(name, {}).get("per_client", {}) for name in METRIC_TITLES}
        values["loss"] = {c: scalars["loss"] for c, scalars in report.per_client.items() if "loss" in scalars}
        for name, by_client in values.items():
            for client, value in by_client.items():
                curves.setdefault(name, {}).setdefault(client, []).append((report.round, value))
    for name, by_client in curves.items():
        figure = curves_figure(by_client, METRIC_TITLES.get(name, f"training {name}"))
        save_figure(figure, folder / "figures" / f"{name}.png")


def draw_communication(history: Sequence[RoundReport], metric: str, folder: Path) -> None:
    """A metric over all that was sent so far; nothing where no client sends anything.

    Args:
        history: One report an exchange.
        metric: Its mean over clients is drawn.
        folder: The run's.
    """
    sent = list(accumulate(sum(report.bytes_up.values()) for report in history))
    values = [(report.metrics or {}).get(metric, {}).get("mean", math.nan) for report in history]
    points = [Point(r.round, s, v) for r, s, v in zip(history, sent, values, strict=True) if math.isfinite(v)]
    if points and points[-1].sent:
        figure = communication_figure(points, metric_title(metric))
        save_figure(figure, folder / "figures" / "communication.png")


def draw_heatmaps(
    federation: Federation,
    data: Data,
    fabric: Fabric,
    folder: Path,
    each: int,
    thresholds: Mapping[int, float],
) -> None:
    """Score distribution of the client with most data, and its best and worst cases where it localises.

    Args:
        federation: After its last round.
        data: The test images.
        fabric: Moves batches and sets precision.
        folder: The run's.
        each: How many of the best and of the worst.
        thresholds: Decision threshold by client; needed on the first process only.
    """
    largest = max(federation.clients, key=lambda c: (data.partition.sizes[c], -c))
    assert isinstance(data.images, ImageSet)
    labels = [sample.label for sample in data.images.test]

    # The process that looks after the client asks it; the first one, which knows the thresholds, draws.
    def answer(client: Client, number: int) -> tuple[torch.Tensor, list[Case]] | None:
        if number != largest:
            return None
        scores = image_scores(client, data.module.test_dataloader(), fabric)
        cases = [
            _case(client, data, fabric, i, float(scores[i])) for i in pick_cases(scores, labels, each, each)
        ]
        return scores, [case for case in cases if case is not None]

    answered = federation.ask(federation.rounds, answer).get(largest)
    if answered is None:
        return
    scores, cases = answered
    threshold = thresholds.get(largest)
    save_figure(score_figure(scores, labels, threshold), folder / "figures" / "scores.png")
    if cases:
        limit = "" if threshold is None else f" (threshold {threshold:.3g})"
        title = f"Client {largest} on {data.images.name}: clearest cases, then hardest{limit}"
        save_figure(heatmap_sheet(cases, title), folder / "figures" / "heatmaps.png")


def _case(client: Client, data: Data, fabric: Fabric, index: int, score: float) -> Case | None:
    """A test image and what the client makes of it; None if its task draws no map."""
    assert isinstance(data.images, ImageSet)
    sample = data.images.test[index]
    batch = data.module.test.__getitems__([index])  # type: ignore[attr-defined]
    anomaly_map = predict_batch(client, batch, fabric).anomaly_map
    if anomaly_map is None:
        return None
    return Case(
        image=data.transform.raw(sample.path).numpy(),
        mask=data.transform.mask(sample.mask, sample.path).numpy() if data.images.has_masks else None,
        anomaly_map=anomaly_map[0].cpu().numpy(),
        caption=f"{sample.category}: {sample.defect}, score {score:.3g}",
    )
