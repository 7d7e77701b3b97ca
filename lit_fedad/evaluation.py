"""Scores clients on the test set, and sets thresholds on normal training images."""

from __future__ import annotations

from typing import Any

import torch
from lightning.fabric import Fabric
from torch import Tensor
from torch.utils.data import DataLoader

from lit_fedad.contracts import Client, Prediction
from lit_fedad.data.datamodule import AnomalyDataModule
from lit_fedad.metrics.anomaly import AnomalyMetrics
from lit_fedad.metrics.federated import summarise


def predict_batch(client: Client, batch: dict[str, Any], fabric: Fabric) -> Prediction:
    """A client's float32 prediction of one batch, without gradients."""
    with torch.inference_mode(), fabric.autocast():
        prediction = client.predict_step(fabric.to_device(batch))
    maps = prediction.anomaly_map
    return Prediction(
        prediction.image_score.float(), None if maps is None else maps.float(), prediction.logits
    )


def image_scores(client: Client, loader: DataLoader, fabric: Fabric) -> Tensor:
    """A client's score of every image that a loader gives [n]."""
    return torch.cat([predict_batch(client, batch, fabric).image_score.cpu() for batch in loader])


class TestSetEvaluator:
    """Evaluates every client on the union of all test images (FedDyMem, Eq. 4).

    Args:
        loader: Test batches in a fixed order.
        pixel: Whether masks are there, so that pixel metrics are defined.
        fabric: Moves batches and sets precision.
    """

    __test__ = False

    def __init__(self, loader: DataLoader, pixel: bool, fabric: Fabric) -> None:
        self.loader, self.pixel, self.fabric = loader, pixel, fabric

    def score(self, client: Client, number: int) -> AnomalyMetrics:
        """Mergeable metric state of one client."""
        metrics = AnomalyMetrics(pixel=self.pixel)
        for batch in self.loader:
            prediction = predict_batch(client, batch, self.fabric)
            pixels = (
                (prediction.anomaly_map.cpu(), batch["mask"])
                if self.pixel and prediction.anomaly_map is not None
                else ()
            )
            metrics.update(prediction.image_score.cpu(), batch["label"], *pixels)
        return metrics

    def spread(self, state: AnomalyMetrics, clients: list[int]) -> dict[int, AnomalyMetrics]:
        """The same state for every client."""
        return dict.fromkeys(clients, state)

    def summarise(self, states: dict[int, AnomalyMetrics]) -> dict[str, Any]:
        """Mean, worst, pooled and per-client values of each metric."""
        return summarise(states)


class Thresholds:
    """Asks clients above which score an image is anomalous: a quantile of their own normal training images' scores.

    Args:
        module: Training data by client.
        fabric: Moves batches and sets precision.
        quantile: Share of the training images below the threshold.
    """

    def __init__(self, module: AnomalyDataModule, fabric: Fabric, quantile: float) -> None:
        self.module, self.fabric, self.quantile = module, fabric, quantile

    def __call__(self, client: Client, number: int) -> float:
        """The client's threshold."""
        scores = image_scores(
            client, self.module.client_loader(number, torch.Generator(), shuffle=False), self.fabric
        )
        return float(torch.quantile(scores.double(), self.quantile))
