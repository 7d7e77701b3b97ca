"""Predictions of single batches, of whole loaders, and of the same images with many clients."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from lightning.fabric import Fabric
from torch import Tensor
from torch.utils.data import DataLoader

from lit_fedad.contracts import Client, Prediction
from lit_fedad.contracts.state import detached, same
from lit_fedad.contracts.task import learned_state


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


def image_scores(client: Client, loader: DataLoader, fabric: Fabric) -> Tensor:
    """Computes a client's scores of all images of a loader [n]."""
    return torch.cat([predict_batch(client, batch, fabric).image_score.cpu() for batch in loader])


_MOST_BYTES = 1 << 28
"""Most memory that embeddings are kept in: those of 12,000 images take 25 MB, of patches they take gigabytes."""


class ImageScorer:
    """A function that scores the images of a loader with a client.

    Clients with banks of their own often share one averaged network. What that makes of the images (`Task.embedding`)
    is computed once, and kept for as long as clients' states are the same, number for number, but for what it does not
    depend on (`Task.scoring_buffers`).

    Args:
        loader: Images in a fixed order.
        fabric: Moves batches and sets precision.
    """

    def __init__(self, loader: DataLoader, fabric: Fabric) -> None:
        self.loader, self.fabric = loader, fabric
        self.network: Mapping[str, Tensor] = {}
        self.embeddings: list[Tensor] = []

    def __call__(self, client: Client) -> Tensor:
        """Computes a client's scores of all images [n]."""
        return torch.cat([prediction.image_score.cpu() for _, _, prediction in self.batches(client)])

    def batches(self, client: Client) -> Iterator[tuple[dict[str, Any], Tensor, Prediction]]:
        """Yields each batch, its embedding, and a client's prediction."""
        task, alone = client.task, client.predictors.shared  # alone: nobody else is asked
        relevant = learned_state(task).keys() - task.scoring_buffers
        network = {} if alone else {n: entry for n, entry in task.state_dict().items() if n in relevant}
        if alone or not same(network, self.network):
            self.network, self.embeddings = detached(network), []
        known, kept, size, batches = self.embeddings, list[Tensor](), 0, 0
        for place, images in enumerate(self.loader):
            batch = self.fabric.to_device(images)
            with torch.inference_mode(), self.fabric.autocast():
                embedding = known[place] if known else task.embedding(batch)
            size, batches = size + embedding.nbytes, batches + 1
            if not known and not alone and size <= _MOST_BYTES:
                kept.append(embedding.cpu())
            yield images, embedding, predict_batch(client, {**batch, "embedding": embedding}, self.fabric)
        if len(kept) == batches:
            self.embeddings = kept
