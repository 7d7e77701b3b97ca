"""Separation of normal images and anomalies under averaged, distilled and local models (FADngs Fig. 8)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from lightning.fabric import Fabric
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from numpy.typing import ArrayLike
from torch import Tensor
from torch.utils.data import DataLoader, Subset

from lit_fedad.contracts import Client, Message
from lit_fedad.data.datamodule import as_batch
from lit_fedad.data.semantic import SemanticSet
from lit_fedad.experiment.federations import draw_some
from lit_fedad.experiment.figures.embedding import density_scores, embed_images, generator_of, last_exchange
from lit_fedad.experiment.run import Run, RunCallback
from lit_fedad.experiment.run_data import Data
from lit_fedad.federation.evaluator import LocalQuery
from lit_fedad.federation.loop import Federation
from lit_fedad.methods.fadngs import FADngsClient, FADngsServer
from lit_fedad.report.figures import save_figure
from lit_fedad.report.style import DARK, FONT_SIZE, LEGEND, blank_figure, style_axes

_IMAGES_PER_BOX = 200  # at most


class Capacities(RunCallback):
    """A callback that draws ``capacities.png`` after the last round of FADngs, unless ``evaluation.pictures`` is 0."""

    def on_rounds_end(self, run: Run) -> None:
        """Draws ``capacities.png``, where anomalies are images of classes that no client has."""
        if run.config["evaluation"]["pictures"] and isinstance(run.local.images, SemanticSet):
            show_capacities(run.federation, run.local, run.fabric, run.folder.path / "figures")


class _Embedded(NamedTuple):
    """A client's densities under one model, and its embedded normal and anomalous test images."""

    mean: Tensor
    covariance: Tensor
    normal: Tensor
    anomalous: Tensor


def show_capacities(federation: Federation, data: Data, fabric: Fabric, figures: Path) -> None:
    """Draws the separation of each client's normal images and anomalies under several models (FADngs Fig. 8).

    The models are the average of the last round, the global model that was distilled from it, and each client's model
    as it was sent for averaging; without distillation the average is the global model. A run that was resumed after its
    last round has only the global model. Under every model each client estimates the densities of its training images.
    The averaged and the global model score with the densities of all clients (if densities are shared), a local model
    with those of its own client. The images of a client are normal test images of its most frequent class, and an
    equal, disjoint share of the anomalous test images.
    """
    assert isinstance(federation.server, FADngsServer)
    assert isinstance(federation.client, FADngsClient)
    chosen = _test_images_by_client(federation, data)
    # Only the first process holds the server's state.
    averaged, local = fabric.broadcast(_other_models(federation.server))

    def answer(client: Client, number: int) -> dict[str, _Embedded]:
        assert isinstance(client, FADngsClient)
        weights = {"averaged": averaged, "global": client.shared_state(), "local": local.get(number)}
        return {name: look(client, number, state) for name, state in weights.items() if state is not None}

    def look(client: FADngsClient, number: int, weights: Message) -> _Embedded:
        client.task.load_state_dict(weights, strict=False)
        z = embed_images(client.task, data.module.client_loader(number, torch.Generator(), shuffle=False))
        normal, anomalous = (
            embed_images(client.task, _test_loader(data, indices)) if len(indices) else z[:0]
            for indices in chosen[number]
        )
        densities = client.task.estimate(z, last_exchange(client, federation.exchanges))
        return _Embedded(densities.mean, densities.covariance, normal, anomalous)

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
            if client not in looks:  # the client was not in the last round, so it has no local model
                scores[name].append((torch.empty(0), torch.empty(0)))
                continue
            mean, covariance, normal, anomalous = looks[client]
            judge = (mean, covariance) if alone else joined
            scores[name].append((density_scores(*judge, normal), density_scores(*judge, anomalous)))
    save_figure(score_boxes_figure(scores, list(answers)), figures / "capacities.png")


def _test_loader(data: Data, indices: Tensor) -> DataLoader:
    """Returns a loader of the test images with these indices, in this order."""
    chosen = Subset(data.module.test, indices.tolist())
    return DataLoader(chosen, data.module.eval_batch_size, collate_fn=as_batch, generator=torch.Generator())


def _other_models(server: FADngsServer) -> tuple[Message | None, Mapping[int, Message]]:
    """Returns the average, if distillation has replaced it, and the local models of the last round."""
    if server.last_merge is None:
        return None, {}
    averaged, local = server.last_merge
    return (None if averaged is server.weights else averaged), local


def _test_images_by_client(federation: Federation, data: Data) -> dict[int, tuple[Tensor, Tensor]]:
    """Returns, by client, the indices of its normal test images and of its share of the anomalous ones."""
    assert isinstance(data.images, SemanticSet)
    draw, labels = generator_of(federation, "capacities"), data.images.test_labels
    counts = data.partition.counts(data.images)[:, : data.images.normal_classes]
    anomalous = (labels >= data.images.normal_classes).nonzero()[:, 0]
    anomalous = anomalous[torch.randperm(len(anomalous), generator=draw)]
    return {
        client: (
            draw_some((labels == int(counts[client].argmax())).nonzero()[:, 0], _IMAGES_PER_BOX, draw),
            anomalous[place :: len(federation.clients)][:_IMAGES_PER_BOX],
        )
        for place, client in enumerate(federation.clients)
    }


_KINDS = ("normal", "anomalous")
_FILLS = ("#A9D4EF", "#F3CE85")  # pale sky blue and pale orange of Okabe and Ito: the red lines stay visible
_RED = "#C1121F"
_MAX_COLUMNS = 5
_LOW, _HIGH = 2, 98  # percentiles that become 0 and 1


def score_boxes_figure(
    scores: Mapping[str, Sequence[tuple[ArrayLike, ArrayLike]]], clients: Sequence[int]
) -> Figure:
    """Draws one panel for each client, with two boxes for each model: scores of normal and of anomalous images.

    Models have different scales of scores, and a local model differs between clients. Therefore the scores of
    one model on one client are scaled together: their 2nd percentile becomes 0, their 98th becomes 1. The
    printed gap between the medians is a share of that range, comparable over models and clients. Boxes span the
    quartiles, whiskers reach the last score within 1.5 times the height of the box; outliers and scores that
    are not finite are left out.

    Args:
        scores: For each model the pairs (scores of normal images, scores of anomalous images), one for each client.
        clients: Number of each client.
    """
    rows = math.ceil(len(clients) / _MAX_COLUMNS)
    columns = math.ceil(len(clients) / rows)
    width = 0.35 + columns * max(1.2, 0.45 * len(scores))
    figure = blank_figure(max(3.5, width), 0.6 + 1.55 * rows)
    panels = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    # Spare panels are left blank in the first row, so that every panel of the last row shows the names of the models.
    spare = rows * columns - len(clients)
    for axes in panels[0, columns - spare :]:
        axes.set_visible(False)
    shown = [*panels[0, : columns - spare], *panels[1:].flat]
    for place, (client, axes) in enumerate(zip(clients, shown, strict=True)):
        _panel(axes, [pairs[place] for pairs in scores.values()])
        axes.set_title(f"client {client}", fontsize=FONT_SIZE, pad=3)
        axes.set_xlim(-0.5, len(scores) - 0.5)
        axes.set_xticks(range(len(scores)), list(scores), rotation=35, ha="right", rotation_mode="anchor")
    shown[0].set_yticks((0, 0.25, 0.5, 0.75, 1))
    low, high = shown[0].get_ylim()
    shown[0].set_ylim(low, high + 0.12 * (high - low))  # room for the values of the gaps
    figure.supylabel("score, scaled", fontsize=FONT_SIZE + 1)
    handles = [
        *(Patch(facecolor=fill, edgecolor=DARK, linewidth=0.5) for fill in _FILLS),
        Line2D([], [], color=_RED, linewidth=1.3),
        Line2D([], [], color=_RED, linewidth=1.1, linestyle=":"),
    ]
    labels = [*_KINDS, "median", "gap between medians"]
    figure.legend(handles, labels, loc="outside upper center", ncols=4 if width > 3.5 else 2, **LEGEND)
    return figure


def _panel(axes: Axes, pairs: Sequence[tuple[ArrayLike, ArrayLike]]) -> None:
    """Draws the boxes of one client, a pair for each model, and the gap between their medians."""
    style_axes(axes)
    line = {"color": DARK, "linewidth": 0.6}
    for place, pair in enumerate(pairs):
        kinds = _scaled(pair)
        for side, fill, values in zip((-1, 1), _FILLS, kinds, strict=True):
            axes.boxplot(
                values,
                positions=[place + 0.22 * side],
                widths=0.3,
                showfliers=False,
                patch_artist=True,
                manage_ticks=False,
                boxprops={"facecolor": fill, "edgecolor": DARK, "linewidth": 0.5},
                medianprops={"color": _RED, "linewidth": 1.3},
                whiskerprops=line,
                capprops=line,
            )
        if all(values.size for values in kinds):
            low, high = (float(np.median(values)) for values in kinds)
            axes.plot([place, place], [low, high], color=_RED, linewidth=1.1, linestyle=":")
            gap, top = f"{high - low:+.2f}", axes.get_xaxis_transform()
            axes.text(
                place, 0.995, gap, transform=top, color=_RED, size=FONT_SIZE - 0.5, ha="center", va="top"
            )


def _scaled(pair: tuple[ArrayLike, ArrayLike]) -> list[np.ndarray]:
    """Scales the finite scores of both kinds to the robust range of the two together."""
    kinds = [np.asarray(values, dtype=float) for values in pair]
    kinds = [values[np.isfinite(values)] for values in kinds]
    together = np.concatenate(kinds)
    if not together.size:
        return kinds
    low, high = np.percentile(together, (_LOW, _HIGH))
    return [(values - low) / ((high - low) or 1.0) for values in kinds]
