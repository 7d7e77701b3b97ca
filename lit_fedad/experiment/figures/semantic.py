"""The pictures of a run on semantic anomalies: what the detectors tell apart, and what densities give away (FADngs)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from lightning.fabric import Fabric
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset

from lit_fedad.contracts import Client, Context, Message, Task
from lit_fedad.data.semantic import SemanticSet
from lit_fedad.evaluation.predict import image_scores
from lit_fedad.experiment.build import Data
from lit_fedad.federation.loop import Federation
from lit_fedad.federation.processes import share
from lit_fedad.memory.density import DensitySet
from lit_fedad.methods.fadngs import COVARIANCE, MEAN, FADngsClient, FADngsServer
from lit_fedad.privacy.distance_correlation import density_privacy
from lit_fedad.report.correlation_heatmap import draw_correlation_heatmap
from lit_fedad.report.figures import save_figure, score_figure, whole_file
from lit_fedad.report.representations import draw_representations
from lit_fedad.report.score_boxes import draw_score_boxes
from lit_fedad.report.tsne import tsne_layout
from lit_fedad.tasks.contrastive import Contrastive

_IN_THE_PLANE = 500  # normal test images that t-SNE lays out, and as many anomalies
_A_BOX = 200  # test images behind one box
_RAW, _RAW_EACH = 2000, 200  # training images that are compared with the densities, in all and of one client


def draw_semantics(
    federation: Federation,
    data: Data,
    fabric: Fabric,
    folder: Path,
    thresholds: Mapping[int, float],
    quantile: float,
) -> dict[str, float] | None:
    """Draws all pictures that the method has something to show for, into ``figures``.

    Args:
        federation: After its last round.
        data: Of a `SemanticSet`.
        fabric: Moves batches and sets precision.
        folder: The run's.
        thresholds: Decision threshold by client; needed on the first process only.
        quantile: Share of a client's training images below its threshold.

    Returns:
        What `report_privacy` says, where densities are shared; on the first process only.
    """
    figures = folder / "figures"
    show_representations(federation, data, fabric, figures, thresholds, quantile)
    if not isinstance(federation.client, FADngsClient):
        return None
    show_capacities(federation, data, fabric, figures)
    return report_privacy(federation, data, fabric, figures) if federation.client.share_densities else None


def show_representations(
    federation: Federation,
    data: Data,
    fabric: Fabric,
    figures: Path,
    thresholds: Mapping[int, float],
    quantile: float,
) -> None:
    """Where test images lie in the first client's representation, and how it judges them (FADngs, Figs. 6 and 7).

    A normal image belongs to the client with most training images of its class. Where the client judges by the
    densities of others too, it is shown beside them how it would judge by its own alone, above the same quantile of
    its training images' scores.

    Args:
        federation: After its last round.
        data: Of a `SemanticSet`.
        fabric: Moves batches and sets precision.
        figures: Folder of ``representations.png`` and ``scores.png``.
        thresholds: Decision threshold by client; needed on the first process only.
        quantile: Share of a client's training images below its threshold.
    """
    assert isinstance(data.images, SemanticSet)
    first = federation.clients[0]
    counts = torch.from_numpy(data.partition.counts(data.images))[:, : data.images.normal_classes]
    labels = data.images.test_labels
    anomalous = labels >= data.images.normal_classes
    owners = torch.cat([counts.argmax(0), torch.full((len(data.images.anomalies),), -1)])[labels]
    held = torch.isin(labels, counts.sum(0).nonzero()[:, 0])
    draw = _generator(federation, "representations")
    shown = [_some(kind.nonzero()[:, 0], _IN_THE_PLANE, draw) for kind in (held, anomalous)]
    indices = torch.cat(shown)

    def answer(client: Client, number: int) -> tuple[Tensor, Tensor, Tensor | None]:
        loader = _loader(data.module.test, indices, data)
        z = _embed(client.task, loader)
        return z, image_scores(client, loader, fabric), _judge_alone(client, number, data, z, quantile)

    answered = federation.ask(federation.rounds, answer, [first]).get(first)
    if answered is None:
        return
    features, scores, alone = answered
    threshold = thresholds[first]
    save_figure(score_figure(scores, anomalous[indices], threshold), figures / "scores.png")
    draw_representations(
        figures / "representations.png",
        tsne_layout(features),
        owners[indices],
        scores > threshold,
        alone,
        first,
        "global densities" if alone is not None else f"decisions of client {first}",
    )


def _judge_alone(client: Client, number: int, data: Data, z: Tensor, quantile: float) -> Tensor | None:
    """What a client's own densities decide; None where they are all that it judges by."""
    task = client.task
    if not isinstance(task, Contrastive) or len(task.densities) <= task.clusters:
        return None
    trained = _embed(task, data.module.client_loader(number, torch.Generator(), shuffle=False))
    own = task.estimate(trained, _last_exchange(client))
    if not len(own.mean):
        return None
    limit = torch.quantile(_scores(own.mean, own.covariance, trained).double(), quantile)
    return _scores(own.mean, own.covariance, z) > limit


class _Look(NamedTuple):
    """A client's densities under one model, and its embedded normal and anomalous test images."""

    mean: Tensor
    covariance: Tensor
    normal: Tensor
    anomalous: Tensor


def show_capacities(federation: Federation, data: Data, fabric: Fabric, figures: Path) -> None:
    """How far each client's normal images and anomalies are apart under several models (FADngs, Fig. 8).

    Models are the average of the last round, the global one that was distilled from it, and each client's own as it
    was sent for averaging; without distillation the average is the global one. A run that was resumed after its last
    round has only the global one left. Under every model each client estimates densities anew, of its own training
    images: the averaged and the global model score against those of all clients (if densities are shared at all), a
    local one against those of its client alone. A client's images are normal test images of the class that it has
    most of, and an equal share of the anomalous ones, in which no two clients have a part in common.

    Args:
        federation: Of FADngs, after its last round.
        data: Of a `SemanticSet`.
        fabric: Moves batches and sets precision.
        figures: Folder of ``capacities.png``.
    """
    assert isinstance(federation.server, FADngsServer)
    assert isinstance(federation.client, FADngsClient)
    chosen = _test_images_by_client(federation, data)
    # Only the first process has the server's memory.
    averaged, local = share(fabric, _models_beside(federation.server))

    def answer(client: Client, number: int) -> dict[str, _Look]:
        assert isinstance(client, FADngsClient)
        weights = {"averaged": averaged, "global": client.shared_state(), "local": local.get(number)}
        return {name: look(client, number, state) for name, state in weights.items() if state is not None}

    def look(client: FADngsClient, number: int, weights: Message) -> _Look:
        client.task.load_state_dict(weights, strict=False)
        z = _embed(client.task, data.module.client_loader(number, torch.Generator(), shuffle=False))
        normal, anomalous = (
            _embed(client.task, _loader(data.module.test, indices, data)) if len(indices) else z[:0]
            for indices in chosen[number]
        )
        found = client.task.estimate(z, _last_exchange(client))
        return _Look(found.mean, found.covariance, normal, anomalous)

    answers = federation.ask(federation.rounds, answer)
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
            if client not in looks:  # it took no part in the last round
                scores[name].append((torch.empty(0), torch.empty(0)))
                continue
            mean, covariance, normal, anomalous = looks[client]
            judge = (mean, covariance) if alone else joined
            scores[name].append((_scores(*judge, normal), _scores(*judge, anomalous)))
    draw_score_boxes(figures / "capacities.png", scores, list(answers))


def _models_beside(server: FADngsServer) -> tuple[Message | None, Mapping[int, Message]]:
    """The average, if distillation has put another model in its place, and the local models of the last round."""
    if server.last_merge is None:
        return None, {}
    averaged, local = server.last_merge
    return (None if averaged is server.weights else averaged), local


def _test_images_by_client(federation: Federation, data: Data) -> dict[int, tuple[Tensor, Tensor]]:
    """Positions of each client's normal and anomalous test images."""
    assert isinstance(data.images, SemanticSet)
    draw, labels = _generator(federation, "capacities"), data.images.test_labels
    counts = data.partition.counts(data.images)[:, : data.images.normal_classes]
    anomalous = (labels >= data.images.normal_classes).nonzero()[:, 0]
    anomalous = anomalous[torch.randperm(len(anomalous), generator=draw)]
    return {
        client: (
            _some((labels == int(counts[client].argmax())).nonzero()[:, 0], _A_BOX, draw),
            anomalous[place :: len(federation.clients)][:_A_BOX],
        )
        for place, client in enumerate(federation.clients)
    }


def report_privacy(
    federation: Federation, data: Data, fabric: Fabric, figures: Path
) -> dict[str, float] | None:
    """How strongly the densities that were shared last depend on the images behind them (FADngs, Eq. 18-19, Fig. 9).

    Of up to 2,000 training images, at most 200 a client, each stands behind that density of its client that it is
    nearest to.

    Args:
        federation: Of FADngs, after its last round.
        data: Of a `SemanticSet`.
        fabric: Moves batches and sets precision.
        figures: Folder of ``distance_correlation.png`` and ``distance_correlation.json``, which has all numbers.

    Returns:
        Distance correlation with the raw images, of samples from the densities (``shared``) and of Gaussian noise of
        the same width (``noise``): plain R^2 and R, and R^2 without its bias. None in all processes but the first,
        and where there are fewer than 4 images.
    """
    assert isinstance(federation.server, FADngsServer)
    assert isinstance(data.images, SemanticSet)
    draw = _generator(federation, "privacy")
    each = min(_RAW_EACH, max(1, _RAW // len(federation.clients)))
    chosen = {c: _some(torch.tensor(data.partition.clients[c]), each, draw) for c in federation.clients}

    def answer(client: Client, number: int) -> Tensor:
        return _embed(client.task, _loader(data.module.train, chosen[number], data))

    answers = federation.ask(federation.rounds, answer)
    if not fabric.is_global_zero:
        return None
    raw = []
    for client, message in federation.server.densities.items():
        known = [
            (mean[None], cov[None]) for mean, cov in zip(message[MEAN], message[COVARIANCE], strict=True)
        ]
        if known:
            nearest = torch.stack([_scores(*density, answers[client]) for density in known]).argmin(0)
            raw += [data.images.train_images[chosen[client][nearest == place]] for place in range(len(known))]
    if sum(map(len, raw)) < 4:
        return None
    joined = federation.server.density_set
    found = density_privacy(joined[MEAN], joined[COVARIANCE], raw, draw)
    tables = {"r_squared": found.r_squared, "r": found.r, "corrected": found.corrected}
    draw_correlation_heatmap(figures / "distance_correlation.png", found.names, *tables.values())
    with whole_file(figures / "distance_correlation.json") as part:
        numbers = {name: table.tolist() for name, table in tables.items()}
        part.write_text(json.dumps({"names": found.names, "images": sum(map(len, raw)), **numbers}, indent=1))
    rows = {"shared": found.names.index("shared densities"), "noise": found.names.index("Gaussian 1")}
    return {
        f"{of}_raw_{name}": float(table[0, row]) for of, row in rows.items() for name, table in tables.items()
    }


@torch.no_grad()
def _embed(task: Task, loader: DataLoader) -> Tensor:
    """Representations of all images [n, D]: z where it is contrastive, else features, their mean over positions."""
    if isinstance(task, Contrastive):
        return task.embed(loader)[0].cpu()
    features = torch.cat(
        [task.features({**batch, "image": batch["image"].to(task.device)}) for batch in loader]
    )
    return (features.mean(1) if features.ndim > 2 else features).cpu()


def _loader(dataset: Dataset, indices: Tensor, data: Data) -> DataLoader:
    """Batches of some images in their order."""
    return DataLoader(
        Subset(dataset, indices.tolist()),
        data.module.eval_batch_size,
        collate_fn=lambda batch: batch,
        generator=torch.Generator(),
    )


def _scores(mean: Tensor, covariance: Tensor, z: Tensor) -> Tensor:
    """Distances to the nearest density [n]; none where there is no density."""
    if not len(mean):
        return z.new_empty(0)
    densities = DensitySet(z.shape[1])
    densities.set(mean, covariance)
    return densities(z)


def _last_exchange(client: Client) -> Context:
    """Where the client last estimated densities, so that clusters are drawn alike."""
    round = client.context.round - 1
    return replace(client.context, round=round, exchange=len(client.exchanges) - 1 if round > 0 else 0)


def _generator(federation: Federation, purpose: str) -> torch.Generator:
    return Context(federation.seed, federation.rounds).generator(purpose)


def _some(indices: Tensor, number: int, draw: torch.Generator) -> Tensor:
    """At most so many of the indices, in ascending order if they are."""
    return indices[torch.randperm(len(indices), generator=draw)[:number].sort().values]
