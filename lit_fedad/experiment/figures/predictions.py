"""Figures of a run's predictions of test images, by kind of anomalies."""

from __future__ import annotations

import torch
from torch import Tensor

from lit_fedad.contracts import Client, Exchanges
from lit_fedad.data.sample import ImageSet
from lit_fedad.data.semantic import SemanticSet
from lit_fedad.evaluation.decisions import pooled_intervals, pooled_rates
from lit_fedad.evaluation.predict import image_scores
from lit_fedad.experiment.build import Data
from lit_fedad.experiment.calibration import alphas, evaluated_images
from lit_fedad.experiment.figures.anomaly import draw_heatmaps
from lit_fedad.experiment.figures.embedding import (
    density_scores,
    draw_some,
    embed_images,
    generator_of,
    last_exchange,
    loader_of,
)
from lit_fedad.experiment.run import Run, RunCallback
from lit_fedad.federation.client_query import LocalQuery
from lit_fedad.metrics.conformal import ScoreCounts
from lit_fedad.report.decision_figures import ClientScores, calibration_figure, client_scores_figure
from lit_fedad.report.figures import save_figure
from lit_fedad.report.knowledge import tsne_layout
from lit_fedad.report.representations import draw_representations
from lit_fedad.tasks.contrastive import Contrastive

_MOST_CLIENTS = 12


def draw_calibration(run: Run) -> None:
    """Draws ``calibration.png``: promised and seen false alarms, and misses, of all clients together.

    Args:
        run: A run whose decisions have been judged (`Run.decisions`), on the first process.
    """
    promised = sorted(run.decisions)
    pooled = [pooled_rates(run.decisions[alpha]) for alpha in promised]
    intervals = [pooled_intervals(run.decisions[alpha]) for alpha in promised]
    sides = ("own", "foreign")
    figure = calibration_figure(
        promised,
        {side: [rates[side].false_alarm_rate for rates in pooled] for side in sides},
        {side: [interval[side] for interval in intervals] for side in sides},
        {side: [rates[side].miss_rate for rates in pooled] for side in sides},
    )
    save_figure(figure, run.folder.path / "figures" / "calibration.png")


def draw_scores(run: Run) -> None:
    """Draws ``scores.png``: each client's calibration and test scores beside the threshold that it ships.

    The threshold is that for images whose product is not known; where a client has too few scores it may be by those of
    all clients. Of many clients the 12 with most images are drawn.

    Args:
        run: A run whose decisions have been judged, on the first process.
    """
    sizes, alpha = run.local.partition.sizes, alphas(run.config)[0]
    anomalous = evaluated_images(run.config, run.local).labels != 0
    largest = sorted(run.scores, key=lambda client: (-sizes[client], client))[:_MOST_CLIENTS]
    clients = {}
    for client in sorted(largest):
        own, scores = ScoreCounts.union(run.calibration.clients.get(client, {}).values()), run.scores[client]
        clients[client] = ClientScores(
            own.edges.numpy(),
            own.counts.numpy(),
            scores[~anomalous].numpy(),
            scores[anomalous].numpy(),
            run.calibration.threshold(client, alpha),
        )
    save_figure(client_scores_figure(clients), run.folder.path / "figures" / "scores.png")


_IN_THE_PLANE = 500  # normal test images that t-SNE lays out, and as many anomalies


def show_representations(run: Run) -> None:
    """Draws test images in the first client's representation, with its decisions (FADngs Fig. 6 and FADngs Fig. 7).

    Writes ``representations.png``. A normal image belongs to the client with most training images of
    its class. Where the client scores by the densities of all clients, its decisions by its own densities alone, with
    the same promise, are drawn beside.

    Args:
        run: A run on a `SemanticSet`, after its last round.
    """
    federation, data, fabric = run.federation, run.local, run.fabric
    figures, alpha = run.folder.path / "figures", alphas(run.config)[0]
    assert isinstance(data.images, SemanticSet)
    first = federation.clients[0]
    counts = torch.from_numpy(data.partition.counts(data.images))[:, : data.images.normal_classes]
    labels = data.images.test_labels
    anomalous = labels >= data.images.normal_classes
    owners = torch.cat([counts.argmax(0), torch.full((len(data.images.anomalies),), -1)])[labels]
    held = torch.isin(labels, counts.sum(0).nonzero()[:, 0])
    draw = generator_of(federation, "representations")
    shown = [draw_some(kind.nonzero()[:, 0], _IN_THE_PLANE, draw) for kind in (held, anomalous)]
    indices = torch.cat(shown)

    def answer(client: Client, number: int) -> tuple[Tensor, Tensor, Tensor | None]:
        loader = loader_of(data.module.test, indices, data)
        z = embed_images(client.task, loader)
        return (
            z,
            image_scores(client, loader, fabric),
            _judge_alone(client, federation.exchanges, number, data, z, alpha),
        )

    answered = federation.ask(federation.rounds, LocalQuery("representations", answer), [first]).get(first)
    if answered is None:
        return
    features, scores, alone = answered
    threshold = run.calibration.threshold(first, alpha)
    draw_representations(
        figures / "representations.png",
        tsne_layout(features),
        owners[indices],
        scores > threshold,
        alone,
        first,
        "global densities" if alone is not None else f"decisions of client {first}",
    )


def _judge_alone(
    client: Client, exchanges: Exchanges, number: int, data: Data, z: Tensor, alpha: float
) -> Tensor | None:
    """Computes decisions by a client's own densities; None where it has no others."""
    task = client.task
    if not isinstance(task, Contrastive) or len(task.densities) <= task.clusters:
        return None
    trained = embed_images(task, data.module.client_loader(number, torch.Generator(), shuffle=False))
    own = task.estimate(trained, last_exchange(client, exchanges))
    if not len(own.mean) or not data.partition.calibration or not data.partition.calibration[number]:
        return None
    held_out = embed_images(task, data.module.normal_loader(data.partition.calibration[number]))
    scores = density_scores(own.mean, own.covariance, held_out)
    return density_scores(own.mean, own.covariance, z) > ScoreCounts.of(scores).threshold(alpha)


class Predictions(RunCallback):
    """A callback that draws decisions and scores, unless ``evaluation.pictures`` is 0."""

    def on_rounds_end(self, run: Run) -> None:
        """Draws the figures in the folder ``figures``."""
        if not run.config["evaluation"]["pictures"] or run.model.task.kind != "anomaly":
            return
        if run.fabric.is_global_zero and run.decisions:
            draw_calibration(run)
            draw_scores(run)
        if isinstance(run.local.images, SemanticSet):
            show_representations(run)
        elif isinstance(run.local.images, ImageSet):
            draw_heatmaps(run)
