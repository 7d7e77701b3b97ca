"""Decision thresholds from normal training images."""

from __future__ import annotations

import torch
from lightning.fabric import Fabric

from lit_fedad.contracts import Client
from lit_fedad.data.datamodule import FederatedDataModule
from lit_fedad.evaluation.predict import image_scores


class Thresholds:
    """A function that computes a client's decision threshold: a quantile of its normal training images' scores.

    Args:
        module: Training data by client.
        fabric: Moves batches and sets precision.
        quantile: Share of the training images below the threshold.
    """

    def __init__(self, module: FederatedDataModule, fabric: Fabric, quantile: float) -> None:
        self.module, self.fabric, self.quantile = module, fabric, quantile

    def __call__(self, client: Client, number: int) -> float:
        """Computes a client's threshold."""
        scores = image_scores(
            client, self.module.client_loader(number, torch.Generator(), shuffle=False), self.fabric
        )
        return float(torch.quantile(scores.double(), self.quantile))
