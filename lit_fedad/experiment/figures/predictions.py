"""Figures of a run's predictions and decisions on test images: scores, calibration, heatmaps and representations."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from numpy.typing import ArrayLike
from scipy.stats import gaussian_kde
from torch import Tensor

from lit_fedad.contracts import Client, Exchanges
from lit_fedad.data.sample import ImageSet
from lit_fedad.data.semantic import SemanticSet
from lit_fedad.evaluation.decisions import pooled_intervals, pooled_rates
from lit_fedad.evaluation.predict import Predicted
from lit_fedad.experiment.decisions import evaluated_images
from lit_fedad.experiment.federations import shown_images
from lit_fedad.experiment.figures.embedding import density_scores, embed_images, last_exchange, tsne_layout
from lit_fedad.experiment.run import Run, RunCallback
from lit_fedad.experiment.run_data import Data
from lit_fedad.federation.evaluator import LocalQuery
from lit_fedad.metrics.conformal import Alpha, Calibration, ScoreCounts
from lit_fedad.report.decision_figures import ClientScores, calibration_figure, client_scores_figure
from lit_fedad.report.figures import save_figure
from lit_fedad.report.heatmaps import Case, heatmap_sheet, pick_cases
from lit_fedad.report.naming import p_value_text
from lit_fedad.report.style import COLOURS, FONT_SIZE, LEGEND, blank_figure, legend_mark
from lit_fedad.tasks.contrastive import Contrastive


def draw_heatmaps(run: Run) -> None:
    """Draws heatmaps of the clearest and the hardest cases of the client with most data, with their p-values.

    Draws nothing if that client has no anomaly maps.
    """
    data, sizes = run.local, run.local.partition.sizes
    largest = max(run.federation.clients, key=lambda client: (sizes[client], -client))
    predicted = run.predictions.get(largest)
    if predicted is None or not predicted.maps:
        return
    assert isinstance(data.images, ImageSet)
    alpha, by_product = run.alphas[0], run.config["calibration"]["by"] == "product"
    captioned, promised = [], set()
    for index, case in drawn_cases(data, predicted, run.config["evaluation"]["pictures"]):
        score = float(predicted.scores[index])
        product = data.images.test[index].category if by_product else None
        rule = run.calibration.rule(largest, alpha, product)
        promised.add(f"{rule.alpha:g}")
        p_value = p_value_text(float(rule.scores.p_values(torch.tensor([score]))))
        captioned.append(replace(case, caption=f"{case.caption}, score {score:.3g}, {p_value}"))
    rates = " or ".join(sorted(promised))
    title = (
        f"Client {largest} on {data.images.name}: clearest cases, then hardest (anomalous: p at most {rates})"
    )
    save_figure(heatmap_sheet(captioned, title), run.folder.path / "figures" / "heatmaps.png")


def drawn_cases(data: Data, predicted: Predicted, each: int) -> Iterator[tuple[int, Case]]:
    """Yields index and case of the clearest test images, then of the hardest, if their anomaly maps were kept.

    Args:
        data: The run's data.
        predicted: The predictions of a client.
        each: Number of cases of each kind.
    """
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


_MAX_CLIENTS = 12


def draw_calibration(run: Run) -> None:
    """Draws ``calibration.png``: false alarms against their promised rate, and misses, of all clients together."""
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
    """Draws ``scores.png``: each client's calibration scores, test scores and shipped threshold.

    The threshold is that for images of unknown product. If a client has too few scores, it may come from the scores of
    all clients. If there are more than 12 clients, the 12 with most images are drawn.
    """
    sizes, alpha = run.local.partition.sizes, run.alphas[0]
    anomalous = evaluated_images(run.config, run.local).labels != 0
    largest = sorted(run.predictions, key=lambda client: (-sizes[client], client))[:_MAX_CLIENTS]
    clients = {}
    for client in sorted(largest):
        calibration = ScoreCounts.union(run.calibration.clients.get(client, {}).values())
        scores = run.predictions[client].scores
        clients[client] = ClientScores(
            calibration.edges.numpy(),
            calibration.counts.numpy(),
            scores[~anomalous].numpy(),
            scores[anomalous].numpy(),
            run.calibration.threshold(client, alpha),
        )
    save_figure(client_scores_figure(clients), run.folder.path / "figures" / "scores.png")


def show_representations(run: Run) -> None:
    """Draws test images in the first client's representation, with its decisions (FADngs Fig. 6 and FADngs Fig. 7).

    Writes ``representations.png``. A normal image belongs to the client with most training images of its class. If the
    client scores with the densities of all clients, another panel shows its decisions with only its own densities, for
    the same promised rate of false alarms.
    """
    federation, data = run.federation, run.local
    alpha = run.alphas[0]
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
    if predicted is None:  # this is not the first process
        return
    figure = representations_figure(
        tsne_layout(features.float()),
        owners[shown],
        predicted.scores[shown] > run.calibration.threshold(first, alpha),
        alone,
        first,
        "global densities" if alone is not None else f"decisions of client {first}",
    )
    save_figure(figure, run.folder.path / "figures" / "representations.png")


def _judge_alone(
    client: Client, exchanges: Exchanges, number: int, data: Data, z: Tensor, alpha: Alpha
) -> Tensor | None:
    """Computes decisions with only a client's own densities; None if it has no other densities, or no calibration."""
    task = client.task
    if not isinstance(task, Contrastive) or len(task.densities) <= task.clusters:
        return None
    trained = embed_images(task, data.module.client_loader(number, torch.Generator(), shuffle=False))
    densities = task.estimate(trained, last_exchange(client, exchanges))
    if not len(densities.mean) or not data.partition.calibration or not data.partition.calibration[number]:
        return None
    held_out = embed_images(task, data.module.normal_loader(data.partition.calibration[number]))
    scores = ScoreCounts.of(density_scores(densities.mean, densities.covariance, held_out))
    limit = Calibration({number: {"": scores}}, shared=False).threshold(number, alpha)
    return density_scores(densities.mean, densities.covariance, z) > limit


_PICTURES = ("calibration.png", "scores.png", "heatmaps.png", "representations.png")


class Predictions(RunCallback):
    """A callback that draws decisions and scores, unless ``evaluation.pictures`` is 0."""

    def on_rounds_end(self, run: Run) -> None:
        """Draws the figures in the folder ``figures``, and removes figures of an earlier judgement of the run."""
        if run.fabric.is_global_zero:
            for name in _PICTURES:
                (run.folder.path / "figures" / name).unlink(missing_ok=True)
        if not run.config["evaluation"]["pictures"] or run.model.task.kind != "anomaly":
            return
        if run.fabric.is_global_zero and run.decisions:
            draw_calibration(run)
            draw_scores(run)
        if isinstance(run.local.images, SemanticSet):
            show_representations(run)
        elif isinstance(run.local.images, ImageSet) and run.fabric.is_global_zero:
            draw_heatmaps(run)


_COLOURS, _RED = COLOURS[:5], COLOURS[5]  # clients are never red or black: these colours mark errors
_MARKERS = ("o", "s", "^", "D")
_BLACK, _GREY = "#000000", "0.78"
_STYLES = ("-", "--", ":", "-.")
_LEGEND_COLUMNS = 3  # as many as fit into a third of a page
_GRID = 60  # a density is evaluated on _GRID x _GRID points
_LEVELS = (0.15, 0.4, 0.65, 0.9)  # contours, as shares of the highest density of a client


def representations_figure(
    places: ArrayLike,
    owner: ArrayLike,
    global_decisions: ArrayLike,
    local_decisions: ArrayLike | None = None,
    local_client: int = 0,
    judge: str = "global densities",
) -> Figure:
    """Draws the representations of clients' images, and which of them are classified wrongly.

    Panels: (a) normal images by client, and anomalies; (b) kernel density of each client's normal images; (c)
    decisions with the densities of all clients; (d) decisions with those of one client alone. In (c) and (d)
    the mark shows the true kind of an image, the colour the decision: red for a normal image called anomalous
    (false detection), black for an anomaly called normal (missing detection), grey for correct decisions.

    Args:
        places: Positions of the images' representations in the plane [n, 2], for example from `tsne_layout`.
        owner: Client of each image [n]; -1 for an anomaly.
        global_decisions: Whether the densities of all clients call an image anomalous, bool [n].
        local_decisions: Whether the densities of one client do, bool [n]; None leaves panel (d) out.
        local_client: Number of that client.
        judge: Source of ``global_decisions``, the title of (c).
    """
    points, owners = np.asarray(places), np.asarray(owner)
    judged = [(judge, np.asarray(global_decisions, dtype=bool))]
    if local_decisions is not None:
        judged.append((f"densities of client {local_client}", np.asarray(local_decisions, dtype=bool)))
    clients = [int(client) for client in np.unique(owners[owners >= 0])]
    size = float(np.clip(3000 / len(points), 5, 20))

    rows, columns = (1, 3) if local_decisions is None else (2, 2)
    legend_height = 0.15 * math.ceil((len(clients) + 1) / _LEGEND_COLUMNS)
    figure = blank_figure(7.16, (3.1 if local_decisions is None else 7.5) + legend_height)
    panels = figure.subplots(rows, columns, sharex=True, sharey=True).flatten()
    _by_client(panels[0], points, owners, clients, size)
    _densities(panels[1], points, owners, clients)
    for axes, letter, (name, calls) in zip(panels[2:], "cd", judged, strict=False):
        _decisions(axes, points, owners < 0, calls, size)
        axes.set_title(f"({letter}) {name}\n{_count_errors(owners < 0, calls)}", fontsize=FONT_SIZE + 1)
    centre = (points.max(axis=0) + points.min(axis=0)) / 2
    reach = 0.56 * np.ptp(points, axis=0).max()
    for axes in panels:
        axes.set(xlim=centre[0] + [-reach, reach], ylim=centre[1] + [-reach, reach], xticks=[], yticks=[])
        axes.set_box_aspect(1)
        axes.spines[:].set(color="0.6", linewidth=0.6)
    figure.legend(handles=_decision_handles(), loc="outside lower center", ncols=4, **LEGEND)
    return figure


def _by_client(
    axes: Axes, places: np.ndarray, owners: np.ndarray, clients: Sequence[int], size: float
) -> None:
    """Draws normal images in the look of their client, and anomalies as red crosses over them."""
    for index, client in enumerate(clients):
        chosen, look = owners == client, _client_style(index)
        axes.scatter(places[chosen, 0], places[chosen, 1], size, linewidths=0, alpha=0.8, **look)
    chosen = owners < 0
    axes.scatter(places[chosen, 0], places[chosen, 1], size, color=_RED, marker="x", linewidths=0.7)
    axes.set_title("(a) clients and anomalies", fontsize=FONT_SIZE + 1)
    handles = [
        legend_mark(f"client {client}", **_client_style(index)) for index, client in enumerate(clients)
    ]
    if chosen.any():
        handles.append(legend_mark("anomaly", color=_RED, marker="x"))
    below = {"loc": "upper center", "bbox_to_anchor": (0.5, 0), "handletextpad": 0.2}
    axes.legend(handles=handles, ncols=_LEGEND_COLUMNS, **LEGEND | below)


def _densities(axes: Axes, places: np.ndarray, owners: np.ndarray, clients: Sequence[int]) -> None:
    """Draws contours of the kernel density of each client's normal images."""
    for index, client in enumerate(clients):
        points = places[owners == client]
        if len(points) < 3:  # in the plane, the covariance of the kernel needs three points
            continue
        margin = 0.5 * np.ptp(points, axis=0)
        sides = np.linspace(points.min(axis=0) - margin, points.max(axis=0) + margin, _GRID).T
        grid = np.stack(np.meshgrid(*sides))
        density = gaussian_kde(points.T)(grid.reshape(2, -1)).reshape(_GRID, _GRID)
        levels = [level * density.max() for level in _LEVELS]
        colour, style = [_client_style(index)["color"]], _STYLES[index // len(_COLOURS) % len(_STYLES)]
        axes.contourf(*grid, density, [levels[0], 1.01 * density.max()], colors=colour, alpha=0.25)
        axes.contour(*grid, density, levels, colors=colour, linewidths=0.8, linestyles=style)
    axes.set_title("(b) kernel density of clients", fontsize=FONT_SIZE + 1)


def _decisions(axes: Axes, places: np.ndarray, anomalous: np.ndarray, calls: np.ndarray, size: float) -> None:
    """Draws correct decisions in grey, and errors over them: false detections red, missing ones black."""
    for correct in (True, False):
        for kind, mark, wrong, line in ((False, "o", _RED, 0), (True, "x", _BLACK, 0.7)):
            chosen = (anomalous == kind) & ((calls == anomalous) == correct)
            colour = _GREY if correct else wrong
            axes.scatter(
                places[chosen, 0], places[chosen, 1], size, color=colour, marker=mark, linewidths=line
            )


def _count_errors(anomalous: np.ndarray, calls: np.ndarray) -> str:
    """Formats the numbers of false and missing detections, each with the number of images of its kind."""
    false, missing = (calls & ~anomalous).sum(), (anomalous & ~calls).sum()
    return f"{false} of {(~anomalous).sum()} false, {missing} of {anomalous.sum()} missing"


def _decision_handles() -> list[Line2D]:
    """Creates the legend's marks of the decisions."""
    return [
        legend_mark("normal, judged rightly", color=_GREY, marker="o"),
        legend_mark("anomaly, judged rightly", color=_GREY, marker="x"),
        legend_mark("false detection", color=_RED, marker="o"),
        legend_mark("missing detection", color=_BLACK, marker="x"),
    ]


def _client_style(index: int) -> dict[str, Any]:
    """Returns colour and mark of a client: the colours in turn, then again with the next mark."""
    turn, colour = divmod(index, len(_COLOURS))
    return {"color": _COLOURS[colour], "marker": _MARKERS[turn % len(_MARKERS)]}
