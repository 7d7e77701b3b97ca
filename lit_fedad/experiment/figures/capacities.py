"""Separation of normal images and anomalies under averaged, distilled and local models (FADngs Fig. 8)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from lightning.fabric import Fabric
from torch import Tensor

from lit_fedad.contracts import Client, Message
from lit_fedad.data.semantic import SemanticSet
from lit_fedad.experiment.build import Data
from lit_fedad.experiment.evaluators import draw_some
from lit_fedad.experiment.figures.embedding import (
    density_scores,
    embed_images,
    generator_of,
    last_exchange,
    loader_of,
)
from lit_fedad.experiment.run import Run, RunCallback
from lit_fedad.federation.evaluator import LocalQuery
from lit_fedad.federation.loop import Federation
from lit_fedad.methods.fadngs import FADngsClient, FADngsServer
from lit_fedad.report.score_boxes import draw_score_boxes

_A_BOX = 200  # test images per box


class Capacities(RunCallback):
    """A callback that draws ``capacities.png`` after the last round of FADngs, unless ``evaluation.pictures`` is 0."""

    def on_rounds_end(self, run: Run) -> None:
        """Draws ``capacities.png``."""
        if run.config["evaluation"]["pictures"]:
            show_capacities(run.federation, run.local, run.fabric, run.folder.path / "figures")


class _Look(NamedTuple):
    """A client's densities under one model, and its embedded normal and anomalous test images."""

    mean: Tensor
    covariance: Tensor
    normal: Tensor
    anomalous: Tensor


def show_capacities(federation: Federation, data: Data, fabric: Fabric, figures: Path) -> None:
    """Draws the separation of each client's normal images and anomalies under several models (FADngs Fig. 8).

    Models are the average of the last round, the global model that was distilled from it, and each client's model as
    sent for averaging; without distillation the average is the global model. A run that was resumed after its last
    round has only the global model. Under every model each client estimates the densities of its training images: the
    averaged and the global model score by those of all clients (if densities are shared), a local model by those of its
    client alone. A client's images are normal test images of its most frequent class, and an equal, disjoint share of
    the anomalous ones.
    """
    assert isinstance(federation.server, FADngsServer)
    assert isinstance(federation.client, FADngsClient)
    chosen = _test_images_by_client(federation, data)
    # Only the first process holds the server's state.
    averaged, local = fabric.broadcast(_models_beside(federation.server))

    def answer(client: Client, number: int) -> dict[str, _Look]:
        assert isinstance(client, FADngsClient)
        weights = {"averaged": averaged, "global": client.shared_state(), "local": local.get(number)}
        return {name: look(client, number, state) for name, state in weights.items() if state is not None}

    def look(client: FADngsClient, number: int, weights: Message) -> _Look:
        client.task.load_state_dict(weights, strict=False)
        z = embed_images(client.task, data.module.client_loader(number, torch.Generator(), shuffle=False))
        normal, anomalous = (
            embed_images(client.task, loader_of(data.module.test, indices, data)) if len(indices) else z[:0]
            for indices in chosen[number]
        )
        found = client.task.estimate(z, last_exchange(client, federation.exchanges))
        return _Look(found.mean, found.covariance, normal, anomalous)

    answers = federation.ask(federation.rounds, LocalQuery("embeddings", answer))
    if not fabric.is_global_zero:
        return
    scores: dict[str, list[tuple[Tensor, Tensor]]] = {}
    for name in dict.fromkeys(name for looks in answers.values() for name in looks):
        looks = {client: answers[client][name] for client in answers if name in answers[client]}
        alone = name == "local" or not federation.client.share_densities
        joined = (
            torch.cat([look.mean for look in looks.values()]),
            torch.cat([look.covariance for look in looks.values()]),
        )
        scores[name] = []
        for client in answers:
            if client not in looks:  # not in the last round
                scores[name].append((torch.empty(0), torch.empty(0)))
                continue
            mean, covariance, normal, anomalous = looks[client]
            judge = (mean, covariance) if alone else joined
            scores[name].append((density_scores(*judge, normal), density_scores(*judge, anomalous)))
    draw_score_boxes(figures / "capacities.png", scores, list(answers))


def _models_beside(server: FADngsServer) -> tuple[Message | None, Mapping[int, Message]]:
    """Returns the average, if distillation has replaced it, and the local models of the last round."""
    if server.last_merge is None:
        return None, {}
    averaged, local = server.last_merge
    return (None if averaged is server.weights else averaged), local


def _test_images_by_client(federation: Federation, data: Data) -> dict[int, tuple[Tensor, Tensor]]:
    """Returns positions of each client's normal and anomalous test images."""
    assert isinstance(data.images, SemanticSet)
    draw, labels = generator_of(federation, "capacities"), data.images.test_labels
    counts = data.partition.counts(data.images)[:, : data.images.normal_classes]
    anomalous = (labels >= data.images.normal_classes).nonzero()[:, 0]
    anomalous = anomalous[torch.randperm(len(anomalous), generator=draw)]
    return {
        client: (
            draw_some((labels == int(counts[client].argmax())).nonzero()[:, 0], _A_BOX, draw),
            anomalous[place :: len(federation.clients)][:_A_BOX],
        )
        for place, client in enumerate(federation.clients)
    }
