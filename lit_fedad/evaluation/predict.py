"""Predictions of images, computed once a round: metrics, decisions and pictures read the same ones."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.fabric import Fabric
from torch import Tensor
from torch.utils.data import DataLoader

from lit_fedad.contracts import Client, Prediction
from lit_fedad.contracts.state import detached, same
from lit_fedad.contracts.task import learned_state
from lit_fedad.core.errors import UserError


def predict_batch(client: Client, batch: dict[str, Any], fabric: Fabric) -> Prediction:
    """Computes a client's float32 prediction of one batch, without gradients.

    Raises:
        UserError: If a task's prediction has another form than `Prediction` says.
    """
    with torch.inference_mode(), fabric.autocast():
        prediction = client.predict_step(fabric.to_device(batch))
    if not isinstance(prediction, Prediction):
        raise _odd(client, f"a {type(prediction).__name__}; give a Prediction(image_score, anomaly_map)")
    scores, maps, logits = prediction.image_score, prediction.anomaly_map, prediction.logits
    images = batch.get("index", batch.get("image"))
    for name, value, form in (("image_score", scores, "[B]"), ("anomaly_map", maps, "[B, H, W]")):
        if value is None and name == "anomaly_map":
            continue
        if not isinstance(value, Tensor):
            raise _odd(client, f"an {name} that is a {type(value).__name__}; give a tensor {form}")
        if value.dim() != form.count(",") + 1 or (images is not None and len(value) != len(images)):
            number = "" if images is None else f", of {len(images)} images"
            raise _odd(client, f"an {name} of shape {list(value.shape)}; give {form}{number}")
    return Prediction(
        scores.float(),
        None if maps is None else maps.float(),
        None if logits is None else logits.float(),
        {name: other.float() for name, other in prediction.others.items()},
    )


def _odd(client: Client, words: str) -> UserError:
    return UserError(f"task {type(client.task).__name__} predicts {words}")


def image_scores(client: Client, loader: DataLoader, fabric: Fabric) -> Tensor:
    """Computes a client's scores of all images of a loader [n]."""
    return torch.cat([predict_batch(client, batch, fabric).image_score.cpu() for batch in loader])


_MAX_BYTES = 1 << 28
"""Most memory for kept embeddings: those of 12,000 images take 25 MB, of patches they take gigabytes."""


class ImageScorer:
    """A function that scores the images of a loader with a client.

    Clients with banks of their own often share one averaged network. Its embeddings of the images (`Task.embedding`)
    are computed once, and kept for as long as clients' states are equal number for number, apart from those that
    embeddings do not depend on (`Task.scoring_buffers`).

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
        task, shared = client.task, client.predictors.shared  # a shared model is scored once: nothing is kept
        relevant = learned_state(task).keys() - task.scoring_buffers
        network = (
            {} if shared else {name: entry for name, entry in task.state_dict().items() if name in relevant}
        )
        if shared or not same(network, self.network):
            self.network, self.embeddings = detached(network), []
        stored, computed, num_bytes, batches = self.embeddings, list[Tensor](), 0, 0
        for number, images in enumerate(self.loader):
            batch = self.fabric.to_device(images)
            with torch.inference_mode(), self.fabric.autocast():
                embedding = stored[number] if stored else task.embedding(batch)
            num_bytes, batches = num_bytes + embedding.nbytes, batches + 1
            if not stored and not shared and num_bytes <= _MAX_BYTES:
                computed.append(embedding.cpu())
            yield images, embedding, predict_batch(client, {**batch, "embedding": embedding}, self.fabric)
        if len(computed) == batches:
            self.embeddings = computed


@dataclass
class Predicted:
    """The predictions of one model for the test images.

    Attributes:
        scores: Image scores [n], by index of the image; NaN where an image was not scored.
        maps: Anomaly maps [H, W] of images that are drawn, by index.
        features: Features [m, D] of images that are drawn as points; None where none are.
    """

    scores: Tensor
    maps: dict[int, Tensor] = field(default_factory=dict)
    features: Tensor | None = None

    @classmethod
    def empty(cls, images: int) -> Predicted:
        """Returns the predictions of so many images before the first is scored."""
        return cls(torch.full((images,), math.nan))


class Cases:
    """The test images that may be drawn as the clearest or the hardest ones of a client.

    `lit_fedad.report.heatmaps.pick_cases` ranks the images of a label by their scores. Whatever it picks is therefore
    among the lowest or the highest scores of its label: maps of no other images are kept.

    Args:
        labels: 0 for a normal image, 1 for an anomalous one, by index of the image.
        each: Number of clearest and of hardest images that are drawn.
        sizes: Training images by client: the client with most is drawn.
    """

    def __init__(self, labels: Sequence[int], each: int, sizes: Mapping[int, int]) -> None:
        self.labels, self.each, self.sizes = labels, each, sizes
        self.client = self.choose(sizes)

    def choose(self, clients: Iterable[int]) -> int:
        """Chooses the client that is drawn among those that take part, and returns it."""
        self.client = max(clients, key=lambda client: (self.sizes[client], -client))
        return self.client

    def add(self, predicted: Predicted, index: Tensor, maps: Tensor) -> None:
        """Adds the maps [B, H, W] of images [B] that have been scored, and drops those that can no longer be picked."""
        batch = index.tolist()
        chosen = self._candidates([*predicted.maps, *batch], predicted.scores)
        for dropped in predicted.maps.keys() - chosen:
            del predicted.maps[dropped]
        for row, image in enumerate(batch):
            if image in chosen:
                predicted.maps[image] = maps[row].to("cpu", copy=True)

    def _candidates(self, images: Sequence[int], scores: Tensor) -> set[int]:
        candidates: set[int] = set()
        for label, sign in ((0, 1), (1, -1)):
            ranked = sorted(
                (sign * float(scores[image]), image)
                for image in images
                if self.labels[image] == label and scores[image].isfinite()
            )
            candidates.update(image for _, image in (*ranked[: self.each], *ranked[-self.each :]))
        return candidates


def predictions(
    client: Client, loader: DataLoader, fabric: Fabric, predicted: Predicted, cases: Cases | None = None
) -> Iterator[tuple[dict[str, Any], Prediction]]:
    """Predicts the batches of a loader.

    Args:
        client: The live client, as it predicts.
        loader: Test batches, each with the ``index`` of its images.
        fabric: Moves batches and sets precision.
        predicted: Receives the scores, and the maps of `cases`.
        cases: Images that may be drawn; None for none.

    Yields:
        Each batch and its prediction.
    """
    for batch in loader:
        prediction = predict_batch(client, batch, fabric)
        predicted.scores[batch["index"].cpu()] = prediction.image_score.cpu()
        if cases is not None and prediction.anomaly_map is not None:
            cases.add(predicted, batch["index"], prediction.anomaly_map)
        yield batch, prediction
