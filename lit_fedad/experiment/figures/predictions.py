"""Figures of a run's predictions of test images, by kind of anomalies."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from lit_fedad.contracts import Client, Exchanges
from lit_fedad.data.sample import ImageSet
from lit_fedad.data.semantic import SemanticSet
from lit_fedad.evaluation.decisions import pooled_intervals, pooled_rates
from lit_fedad.evaluation.predictions import Predicted
from lit_fedad.experiment.build import Data
from lit_fedad.experiment.decisions import evaluated_images
from lit_fedad.experiment.evaluators import shown_images
from lit_fedad.experiment.figures.embedding import density_scores, embed_images, last_exchange
from lit_fedad.experiment.run import Run, RunCallback
from lit_fedad.federation.evaluator import LocalQuery
from lit_fedad.metrics.conformal import Alpha, Calibration, ScoreCounts
from lit_fedad.report.decision_figures import ClientScores, calibration_figure, client_scores_figure
from lit_fedad.report.figures import save_figure
from lit_fedad.report.heatmaps import Case, heatmap_sheet, pick_cases
from lit_fedad.report.knowledge import tsne_layout
from lit_fedad.report.naming import p_value_text
from lit_fedad.report.representations import draw_representations
from lit_fedad.tasks.contrastive import Contrastive


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


_MOST_CLIENTS = 12


def draw_calibration(run: Run) -> None:
    """Draws ``calibration.png``: promised and seen false alarms, and misses, of all clients together."""
    promised = sorted(alpha for alpha in run.decisions if not isinstance(alpha, str))
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
    """
    sizes, alpha = run.local.partition.sizes, run.alphas[0]
    anomalous = evaluated_images(run.config, run.local).labels != 0
    largest = sorted(run.predictions, key=lambda client: (-sizes[client], client))[:_MOST_CLIENTS]
    clients = {}
    for client in sorted(largest):
        own = ScoreCounts.union(run.calibration.clients.get(client, {}).values())
        scores = run.predictions[client].scores
        clients[client] = ClientScores(
            own.edges.numpy(),
            own.counts.numpy(),
            scores[~anomalous].numpy(),
            scores[anomalous].numpy(),
            run.calibration.threshold(client, alpha),
        )
    save_figure(client_scores_figure(clients), run.folder.path / "figures" / "scores.png")


def show_representations(run: Run) -> None:
    """Draws test images in the first client's representation, with its decisions (FADngs Fig. 6 and FADngs Fig. 7).

    Writes ``representations.png``. A normal image belongs to the client with most training images of
    its class. Where the client scores by the densities of all clients, its decisions by its own densities alone, with
    the same promise, are drawn beside.
    """
    federation, data = run.federation, run.local
    figures, alpha = run.folder.path / "figures", run.alphas[0]
    assert isinstance(data.images, SemanticSet)
    first = federation.clients[0]
    counts = torch.from_numpy(data.partition.counts(data.images))[:, : data.images.normal_classes]
    anomalies = torch.full((len(data.images.anomalies),), -1)
    owners = torch.cat([counts.argmax(0), anomalies])[data.images.test_labels]
    shown = shown_images(data.images, data.partition, federation.seed, federation.rounds)
    predicted = run.predictions.get(first)
    features = run.fabric.broadcast(None if predicted is None else predicted.features)
    if features is None:
        return

    def answer(client: Client, number: int) -> Tensor | None:
        return _judge_alone(client, federation.exchanges, number, data, features, alpha)

    alone = federation.ask(federation.rounds, LocalQuery("own decisions", answer), [first]).get(first)
    if predicted is None:  # another process than the first
        return
    draw_representations(
        figures / "representations.png",
        tsne_layout(features),
        owners[shown],
        predicted.scores[shown] > run.calibration.threshold(first, alpha),
        alone,
        first,
        "global densities" if alone is not None else f"decisions of client {first}",
    )


def _judge_alone(
    client: Client, exchanges: Exchanges, number: int, data: Data, z: Tensor, alpha: Alpha
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
    scores = ScoreCounts.of(density_scores(own.mean, own.covariance, held_out))
    limit = Calibration({number: {"": scores}}, shared=False).threshold(number, alpha)
    return density_scores(own.mean, own.covariance, z) > limit


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
        elif isinstance(run.local.images, ImageSet) and run.fabric.is_global_zero:
            draw_heatmaps(run)
