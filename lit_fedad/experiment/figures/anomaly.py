"""Heatmaps of single images, and their p-values."""

from __future__ import annotations

from dataclasses import replace

import torch
from lightning.fabric import Fabric

from lit_fedad.contracts import Client
from lit_fedad.data.sample import ImageSet
from lit_fedad.evaluation.predict import predict_batch
from lit_fedad.experiment.build import Data
from lit_fedad.experiment.calibration import alphas
from lit_fedad.experiment.run import Run
from lit_fedad.federation.client_query import LocalQuery
from lit_fedad.report.figures import save_figure
from lit_fedad.report.heatmaps import Case, heatmap_sheet, pick_cases
from lit_fedad.report.naming import p_value_text


def draw_heatmaps(run: Run) -> None:
    """Draws the best and the worst cases of the client with most data, with their p-values, where it localises.

    Args:
        run: A run after its last round; ``evaluation.pictures`` is the number of best and of worst cases.
    """
    federation, data, fabric, each = (
        run.federation,
        run.local,
        run.fabric,
        run.config["evaluation"]["pictures"],
    )
    folder = run.folder.path
    largest = max(federation.clients, key=lambda c: (data.partition.sizes[c], -c))
    assert isinstance(data.images, ImageSet)
    labels = [sample.label for sample in data.images.test]

    # The client's process computes its predictions; the first process, which holds the calibration, draws.
    def answer(client: Client, number: int) -> list[tuple[int, float, Case]] | None:
        if number != largest:
            return None
        scores = data.scorer(client)
        cases = {i: case_of(client, data, fabric, i) for i in pick_cases(scores, labels, each, each)}
        return [(i, float(scores[i]), case) for i, case in cases.items() if case is not None]

    cases = federation.ask(federation.rounds, LocalQuery("heatmaps", answer)).get(largest)
    if not cases:
        return
    alpha, by_product = alphas(run.config)[0], run.config["calibration"]["by"] == "product"
    captioned = []
    for index, score, case in cases:
        product = data.images.test[index].category if by_product else None
        known = run.calibration.source(largest, alpha, product).scores
        p_value = p_value_text(float(known.p_values(torch.tensor([score]))))
        captioned.append(replace(case, caption=f"{case.caption}, score {score:.3g}, {p_value}"))
    title = f"Client {largest} on {data.images.name}: clearest cases, then hardest (anomalous: p at most {alpha:g})"
    save_figure(heatmap_sheet(captioned, title), folder / "figures" / "heatmaps.png")


def case_of(client: Client, data: Data, fabric: Fabric, index: int) -> Case | None:
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
        caption=f"{sample.category}: {sample.defect}",
    )
