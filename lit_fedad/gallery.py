"""The pictures of a run: who holds what, how it went, what the detector sees."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from lightning.fabric import Fabric

from lit_fedad.assembly import Data
from lit_fedad.contracts import Client
from lit_fedad.evaluation import image_scores, predict_batch
from lit_fedad.federation.loop import Federation, RoundReport
from lit_fedad.report.figures import curves_figure, partition_figure, save_figure, score_figure
from lit_fedad.report.heatmaps import Case, heatmap_sheet, pick_cases

NAMES = {"i_auroc": "I-AUROC", "p_auroc": "P-AUROC", "pro": "PRO", "aupr": "AUPR", "loss": "training loss"}


def draw_partition(data: Data, folder: Path) -> None:
    """Who holds how much of what (the paper's Fig. 5)."""
    figure = partition_figure(data.partition.counts(data.images), data.images.products)
    save_figure(figure, folder / "figures" / "partition.png")


def draw_curves(history: Sequence[RoundReport], folder: Path) -> None:
    """Loss and metrics of each client over the rounds."""
    for name, label in NAMES.items():
        by_client: dict[int, list[tuple[int, float]]] = {}
        for report in history:
            values = (
                {c: scalars[name] for c, scalars in report.per_client.items() if name in scalars}
                if name == "loss"
                else (report.metrics or {}).get(name, {}).get("per_client", {})
            )
            for client, value in values.items():
                by_client.setdefault(client, []).append((report.round, value))
        if by_client:
            save_figure(curves_figure(by_client, label), folder / "figures" / f"{name}.png")


def draw_heatmaps(federation: Federation, data: Data, fabric: Fabric, folder: Path, each: int) -> None:
    """Best and worst cases of the client with most data, and its score distribution."""
    largest = max(federation.clients, key=lambda c: (data.partition.sizes[c], -c))

    def draw(client: Client, number: int) -> None:
        if number != largest:
            return
        loader = data.module.test_dataloader()
        scores = image_scores(client, loader, fabric)
        labels = torch.tensor([sample.label for sample in data.images.test])
        cases = []
        for index in pick_cases(scores.numpy(), labels.numpy(), each, each):
            sample = data.images.test[index]
            prediction = predict_batch(client, data.module.test.__getitems__([index]), fabric)  # type: ignore[attr-defined]
            if prediction.anomaly_map is None:
                return
            cases.append(
                Case(
                    image=data.transform.raw(sample.path).numpy(),
                    mask=data.transform.mask(sample.mask, sample.path).numpy() if data.images.has_masks else None,
                    anomaly_map=prediction.anomaly_map[0].cpu().numpy(),
                    caption=f"{sample.product}: {sample.defect}, {float(scores[index]):.3g}",
                )
            )
        title = f"Client {number} on {data.images.name}: {each} clearest and {each} hardest cases"
        save_figure(heatmap_sheet(cases, title), folder / "figures" / "heatmaps.png")
        save_figure(score_figure(scores.numpy(), labels.numpy(), None), folder / "figures" / "scores.png")

    federation.ask(federation.rounds, draw)
