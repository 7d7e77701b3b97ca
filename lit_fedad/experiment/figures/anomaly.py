"""Heatmaps of single images, and their p-values."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from lit_fedad.data.sample import ImageSet
from lit_fedad.evaluation.predictions import Predicted
from lit_fedad.experiment.build import Data
from lit_fedad.experiment.run import Run
from lit_fedad.report.figures import save_figure
from lit_fedad.report.heatmaps import Case, heatmap_sheet, pick_cases
from lit_fedad.report.naming import p_value_text


def draw_heatmaps(run: Run) -> None:
    """Draws the best and the worst cases of the client with most data, with their p-values, where it localises."""
    data, sizes = run.local, run.local.partition.sizes
    largest = max(run.federation.clients, key=lambda client: (sizes[client], -client))
    predicted = run.predictions.get(largest)
    if predicted is None or not predicted.maps:
        return
    assert isinstance(data.images, ImageSet)
    alpha, by_product = run.alphas[0], run.config["calibration"]["by"] == "product"
    promised, captioned = run.calibration.rate(largest, alpha), []
    for index, case in drawn_cases(data, predicted, run.config["evaluation"]["pictures"]):
        score, product = (
            float(predicted.scores[index]),
            data.images.test[index].category if by_product else None,
        )
        known = run.calibration.rule(largest, alpha, product).scores
        p_value = p_value_text(float(known.p_values(torch.tensor([score]))))
        captioned.append(replace(case, caption=f"{case.caption}, score {score:.3g}, {p_value}"))
    title = f"Client {largest} on {data.images.name}: clearest cases, then hardest (anomalous: p at most {promised:g})"
    save_figure(heatmap_sheet(captioned, title), run.folder.path / "figures" / "heatmaps.png")


def drawn_cases(data: Data, predicted: Predicted, each: int) -> Iterator[tuple[int, Case]]:
    """Yields index and case of the clearest test images, then of the hardest; of none whose map was not kept."""
    assert isinstance(data.images, ImageSet)
    labels = [sample.label for sample in data.images.test]
    for index in pick_cases(predicted.scores, labels, each, each):
        if index not in predicted.maps:
            continue
        sample = data.images.test[index]
        yield (
            index,
            Case(
                image=data.transform.raw(sample.path).numpy(),
                mask=data.transform.mask(sample.mask, sample.path).numpy() if data.images.has_masks else None,
                anomaly_map=predicted.maps[index].numpy(),
                caption=f"{sample.category}: {sample.defect}",
            ),
        )
