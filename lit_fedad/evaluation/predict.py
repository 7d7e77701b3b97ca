"""Predictions of single batches and of whole loaders."""

from __future__ import annotations

from typing import Any

import torch
from lightning.fabric import Fabric
from torch import Tensor
from torch.utils.data import DataLoader

from lit_fedad.contracts import Client, Prediction


def predict_batch(client: Client, batch: dict[str, Any], fabric: Fabric) -> Prediction:
    """Computes a client's float32 prediction of one batch, without gradients."""
    with torch.inference_mode(), fabric.autocast():
        prediction = client.predict_step(fabric.to_device(batch))
    maps = prediction.anomaly_map
    logits = prediction.logits
    return Prediction(
        prediction.image_score.float(),
        None if maps is None else maps.float(),
        None if logits is None else logits.float(),
        {name: other.float() for name, other in prediction.others.items()},
    )


def embed_batch(client: Client, batch: dict[str, Any], fabric: Fabric) -> Tensor:
    """Computes what a client's task scores the images of a batch by, without gradients."""
    with torch.inference_mode(), fabric.autocast():
        return client.task.embedding(fabric.to_device(batch))


def image_scores(client: Client, loader: DataLoader, fabric: Fabric) -> Tensor:
    """Computes a client's scores of all images of a loader [n]."""
    return torch.cat([predict_batch(client, batch, fabric).image_score.cpu() for batch in loader])
