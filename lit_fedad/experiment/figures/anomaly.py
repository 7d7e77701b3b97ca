"""Figures of an anomaly detector's scores, and heatmaps of single images."""

from __future__ import annotations

import math

import torch
from lightning.fabric import Fabric

from lit_fedad.contracts import Client
from lit_fedad.data.sample import ImageSet
from lit_fedad.evaluation.predict import image_scores, predict_batch
from lit_fedad.experiment.build import Data
from lit_fedad.experiment.calibration import alphas
from lit_fedad.experiment.run import Run
from lit_fedad.report.figures import save_figure, score_figure
from lit_fedad.report.heatmaps import Case, heatmap_sheet, pick_cases


def draw_heatmaps(run: Run) -> None:
    """Draws the score distribution of the client with most data, and its best and worst cases where it localises.

    Args:
        run: A run after its last round; ``evaluation.pictures`` is the number of best and of worst cases.
    """
    federation, data, fabric, each = (
        run.federation,
        run.data,
        run.fabric,
        run.config["evaluation"]["pictures"],
    )
    folder = run.folder.path
    largest = max(federation.clients, key=lambda c: (data.partition.sizes[c], -c))
    assert isinstance(data.images, ImageSet)
    labels = [sample.label for sample in data.images.test]

    # The client's process computes its predictions; the first process, which holds the calibration, draws.
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
    limit = run.calibration.threshold(largest, alphas(run.config)[0])
    threshold = limit if math.isfinite(limit) else None
    save_figure(score_figure(scores, labels, threshold), folder / "figures" / "scores.png")
    if cases:
        above = "" if threshold is None else f" (threshold {threshold:.3g})"
        title = f"Client {largest} on {data.images.name}: clearest cases, then hardest{above}"
        save_figure(heatmap_sheet(cases, title), folder / "figures" / "heatmaps.png")


def _case(client: Client, data: Data, fabric: Fabric, index: int, score: float) -> Case | None:
    """Returns a test image with the client's prediction; None if its task does not localise."""
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
