"""Prototype statistics: clients send class means and one covariance; the classifier follows in closed form.

Linear discriminant analysis of frozen features, federated: counts, means and scatters add up over clients and stages,
so that the classifier is that of one client with all images, whatever the partition and the order of stages: nothing is
forgotten. Nothing is trained, and rounds send nothing but the statistics of images that have come since.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lit_fedad.contracts import (
    Client,
    Evidence,
    Exchange,
    Exchanges,
    Free,
    Message,
    MessageSpec,
    NothingNew,
    Prediction,
    Predictors,
    Server,
    Sums,
    TensorSpec,
    Update,
)
from lit_fedad.contracts.compute import full_precision, map_batches
from lit_fedad.contracts.disclosure import by_class
from lit_fedad.contracts.evidence import SharedModel, SharedMoments, SharedPrototypes, Shown
from lit_fedad.contracts.sums import HiddenByNoiseError
from lit_fedad.core.bounds import above
from lit_fedad.core.errors import UserError
from lit_fedad.memory.moments import check_covariance, symmetric, upper_triangle
from lit_fedad.methods.parts.feature_sums import PrototypeSums
from lit_fedad.methods.parts.noised_subspace import from_triangle, triangle, without_negative
from lit_fedad.models.encoders import FrozenEncoder
from lit_fedad.tasks.classifier import Classifier, uncertainty

_ROOT = math.sqrt(3)


class ImagePrototypes:
    """The sums ``count`` [K], ``total`` [K, C] and ``product`` [C (C + 1) / 2], each divided by the root of 3.

    The label, the feature, which has length 1, and its products have norm 1 each: together every image has norm 1. A
    clip of less shortens all alike, which changes nothing.

    Args:
        client: Features and classes; it keeps its own counts of labels.
    """

    def __init__(self, client: PrototypeStatisticsClient) -> None:
        self.client, self.task = client, client.task

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Declares the sums."""
        classes, channels = self.task.classes, self.task.num_features
        return {
            "count": (classes,),
            "total": (classes, channels),
            "product": (channels * (channels + 1) // 2,),
        }

    @torch.no_grad()
    def per_image(self, loader: Iterable[Any]) -> Iterator[dict[str, Tensor]]:
        """Yields label, feature and products of each image, and counts the client's own labels."""
        client, channels = self.client, self.task.num_features
        rows, columns, lengths = triangle(channels)
        counts = torch.zeros_like(client.own_counts)

        def features(batch: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
            return self.task(batch).double().cpu() / client.length, batch["label"].cpu()

        for vectors, labels in map_batches(self.task, loader, features):
            label = torch.nn.functional.one_hot(labels, self.task.classes).double()
            counts = counts + label.sum(0)
            yield {
                "count": label / _ROOT,
                "total": label[:, :, None] * vectors[:, None] / _ROOT,
                "product": vectors[:, rows] * vectors[:, columns] * lengths.double() / _ROOT,
            }
        client.own_counts = counts

    def from_sums(self, server: Any, sums: Mapping[str, Tensor], noise: float) -> Message:
        """Computes ``count`` [1, K], ``mean`` [1, K, C] and ``within`` [1, C (C + 1) / 2] of all images.

        Classes whose count lies within three deviations of the noise are taken for empty.

        Raises:
            HiddenByNoiseError: If all do.
        """
        counts = _ROOT * sums["count"]
        shown = counts > max(0.5, 3 * _ROOT * noise) if noise > 0 else counts > 0
        if not shown.any():
            raise HiddenByNoiseError
        counts = torch.where(shown, counts, 0.0)
        mean = torch.where(shown[:, None], _ROOT * sums["total"] / counts.clamp(min=1e-9)[:, None], 0.0)
        images = counts.sum()
        product = from_triangle(_ROOT * sums["product"] / images, mean.shape[1])
        within = without_negative(product - (mean.T * counts / images) @ mean)
        return {
            "count": counts.round().clamp(min=1).where(shown, 0.0).long()[None],
            "mean": mean.clamp(-1, 1).float()[None],
            "within": upper_triangle(within).clamp(-1, 1).float()[None],
        }


_LENGTH_TOLERANCE = 0.01  # kept features are in half precision
_RARE = 1e-6  # share of classes that a client has never had

_ABSENT = -1e6
"""Logit of classes that no image has shown, beside the least that another may have."""
_LEAST_RIDGE = 1e-8
"""What is added to variances at least: where each class has a single image, they have none."""


class Statistics(Exchange[Any, Any]):
    """The exchange in which clients send the statistics of a stage that has begun, if any.

    Args:
        first: Whether it is the one before round 1; later ones bring something only where data come in stages.
    """

    name = "statistics"

    def __init__(self, first: bool = False) -> None:
        by_image = ImagePrototypes if first else _nothing_new  # privacy knows no stages
        self.sums = Sums(lambda client: PrototypeSums(), by_image)


class PrototypeStatisticsClient(Client):
    """A client that sends statistics of its features by class, and predicts with the classifier of all clients.

    Args:
        task: A classifier whose encoder is a frozen one without a network of its own (``features.hidden=0``).
        prior: Class frequencies that a deployed client expects: ``balanced``, all alike, or ``own``, its own.

    Raises:
        UserError: If the encoder is trained.
    """

    needs = Classifier
    state_names = ("measured", "own_counts")
    task: Classifier

    def __init__(self, task: Classifier, prior: Literal["balanced", "own"] = "balanced") -> None:
        super().__init__(task)
        encoder = task.encoder
        if not isinstance(encoder, FrozenEncoder) or encoder.network is not None:
            raise UserError(
                "method prototype_statistics needs features that stay: give task=classifier features=frozen"
                " features.hidden=0"
            )
        self.length = encoder.length
        self.prior, self.measured = prior, 0
        self.own_counts = torch.zeros(task.classes, dtype=torch.float64)

    @property
    def predictors(self) -> Predictors:
        """The server's classifier; that with the client's own prior is another one, ``prior``."""
        return Predictors(own=False, heads=("prior",))

    def receive(self, message: Message) -> None:
        """Loads the classifier, if there is one yet."""
        if len(message["weight"]):
            self.task.classifier.weight.data.copy_(message["weight"][0] / self.length)
            self.task.classifier.bias.data.copy_(message["bias"][0])

    def predict_step(self, batch: Mapping[str, Any], batch_idx: int = 0) -> Prediction:
        """Predicts with all classes alike frequent, and with the client's frequencies (``prior``)."""
        with full_precision(self.task.classifier.weight):
            balanced = self.task.predict_step(batch)
        assert balanced.logits is not None
        shares = (self.own_counts / self.own_counts.sum().clamp(min=1)).clamp(min=_RARE)
        logits = balanced.logits + shares.log().to(balanced.logits)
        main = balanced.logits if self.prior == "balanced" else logits
        return Prediction(uncertainty(main), logits=main, others={"prior": logits})

    def broadcast_spec(self) -> MessageSpec:
        """Declares a classifier, or none."""
        known, shape = Free("classifiers", 1), tuple(self.task.classifier.weight.shape)
        return {"weight": TensorSpec((known, *shape)), "bias": TensorSpec((known, shape[0]))}

    discloses = (by_class("count and mean of the features of each class, and their covariance"),)

    @torch.no_grad()
    def send(self, loader: DataLoader) -> Message:
        """Returns ``count`` [n, K], ``mean`` [n, K, C] and ``within`` [n, C (C + 1) / 2] of the images of a new stage.

        n is 1 in the first message of each stage, and 0 later. ``within`` is the covariance around classes' means. All
        are of features at length 1.
        """
        classes, channels, stage = self.task.classes, self.task.num_features, self.context.stage
        if self.measured > stage:
            return _empty(classes, channels)
        self.measured = stage + 1
        task = self.task
        pairs = map_batches(task, loader, lambda batch: (task(batch).double().cpu(), batch["label"].cpu()))
        features, labels = (torch.cat(parts) for parts in zip(*pairs, strict=True))
        features = features / self.length
        count = labels.bincount(minlength=classes)
        total = torch.zeros(classes, channels, dtype=torch.float64).index_add_(0, labels, features)
        mean = total / count.clamp(min=1)[:, None]
        around = features - mean[labels]
        self.own_counts = self.own_counts + count
        return {
            "count": count[None],
            "mean": mean.float()[None],
            "within": upper_triangle(around.T @ around / len(labels)).float()[None],
        }

    def upload_spec(self) -> MessageSpec:
        """Declares the form of `send`; features have length 1."""
        classes, channels = self.task.classes, self.task.num_features
        sent = Free("stages", 1)
        return {
            "count": TensorSpec((sent, classes), torch.int64, low=0, counted=True),
            "mean": TensorSpec((sent, classes, channels), low=-1, high=1),
            "within": TensorSpec((sent, channels * (channels + 1) // 2), low=-1, high=1, exact=True),
        }


class PrototypeStatisticsServer(Server):
    """The server, which adds statistics up and computes the classifier.

    Args:
        client: A client, for sizes.
        shrinkage: Share of the mean variance that is added to the variance of every direction.
    """

    state_names = ("count", "mean", "scatter", "classifier")
    merges_sums = True

    def __init__(self, client: PrototypeStatisticsClient, shrinkage: float = 0.1) -> None:
        super().__init__()
        above("method.server", 0, shrinkage=shrinkage)
        classes, channels = client.task.classes, client.task.num_features
        self.shrinkage = shrinkage
        self.count = torch.zeros(classes, dtype=torch.float64)
        self.mean = torch.zeros(classes, channels, dtype=torch.float64)
        self.scatter = torch.zeros(channels, channels, dtype=torch.float64)
        self.classifier = {"weight": torch.zeros(0, classes, channels), "bias": torch.zeros(0, classes)}

    def broadcast(self, client_id: int) -> Message:
        """Returns the classifier, the same to every client."""
        return self.classifier

    def validate(self, client_id: int, update: Update) -> None:
        """Checks that the counts are of the client's images, and that the covariance is one."""
        for count, mean, within in _parts(update.message):
            if int(count.sum()) != update.num_samples:
                raise UserError(f"the client counts {int(count.sum())} images of its {update.num_samples}")
            check_covariance(within)
            # Features have length 1: what their means leave of it is their variance.
            length = float(within.trace() + (count / count.sum()) @ mean.square().sum(1))
            if abs(length - 1) > _LENGTH_TOLERANCE:
                raise UserError(f"the client's features have a mean square length of {length:.3g}, not 1")

    def aggregate(self, updates: Mapping[int, Update]) -> None:
        """Adds the statistics up, and computes the classifier if there are new ones."""
        for update in updates.values():
            for part in _parts(update.message):
                self.add(*part)
        if any(len(update.message["count"]) for update in updates.values()):
            self.learn()

    def add(self, count: Tensor, mean: Tensor, within: Tensor) -> None:
        """Adds the statistics of further images: counts [K], means [K, C] and their covariance within classes [C, C].

        The scatter around a mean of two sets exceeds the sum of theirs by ``n_1 n_2 / (n_1 + n_2) d d^T``, with d the
        distance of their means.
        """
        both = (self.count + count).clamp(min=1)
        apart = mean - self.mean
        between = (apart.T * (self.count * count / both)) @ apart
        self.scatter = self.scatter + count.sum() * within + between
        self.mean = self.mean + (count / both)[:, None] * apart
        self.count = self.count + count

    def learn(self) -> None:
        """Computes linear discriminants ``S^-1 (m_k - m)`` and ``-(m_k - m)^T S^-1 (m_k + m) / 2``.

        S is the covariance within classes, m the mean of the classes' means m_k. All classes are expected alike often.
        """
        within = self.scatter / self.count.sum()
        ridge = (self.shrinkage * within.diagonal().mean()).clamp(min=_LEAST_RIDGE)
        within = within + ridge * torch.eye(len(within), dtype=within.dtype)
        known = self.count > 0
        # What discriminants have in common decides nothing, and its rounding can be larger than what decides.
        middle = self.mean[known].mean(0)
        away = torch.where(known[:, None], self.mean - middle, 0.0)
        weight = torch.linalg.solve(within, away.T).T
        bias = -(weight * (self.mean + middle)).sum(1) / 2
        least = (bias - weight.norm(dim=1))[known].min()  # of features, which have length 1
        bias = torch.where(known, bias, least + _ABSENT)
        self.classifier = {"weight": weight.float()[None].contiguous(), "bias": bias.float()[None]}


def _parts(message: Message) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Returns counts, means and covariance of each stage in a message, in double precision."""
    rows = zip(message["count"], message["mean"], message["within"], strict=True)
    return [
        (count.double(), mean.double(), symmetric(within.double(), mean.shape[1]))
        for count, mean, within in rows
    ]


def _nothing_new(client: PrototypeStatisticsClient) -> NothingNew:
    return NothingNew(_empty(client.task.classes, client.task.num_features))


def _empty(classes: int, channels: int) -> Message:
    return {
        "count": torch.zeros(0, classes, dtype=torch.int64),
        "mean": torch.zeros(0, classes, channels),
        "within": torch.zeros(0, channels * (channels + 1) // 2),
    }


def _sent(client: PrototypeStatisticsClient, received: Message, sent: Message) -> list[Shown]:
    """Lists the classes' means in an upload, and the moments of all its features."""
    shown, task = list[Shown](), client.task

    def features(batch: Mapping[str, Any]) -> Tensor:
        return task(batch) / client.length

    for count, mean, within in _parts(sent):
        held, shares = count > 0, count / count.sum()
        centre = shares @ mean
        between = (mean.T * shares) @ mean - centre.outer(centre)
        shown += [
            SharedPrototypes(mean[held], held.nonzero().flatten(), features),
            SharedMoments(centre, within + between, lambda batch: features(batch)[:, None].cpu()),
        ]
    return shown


def _received(client: PrototypeStatisticsClient, received: Message) -> list[Shown]:
    """Lists the classifier of all clients, if there is one yet."""
    return [SharedModel()] if len(received["weight"]) else []


def exchanges(client: PrototypeStatisticsClient) -> Exchanges:
    """Statistics before round 1; in rounds those of new images."""
    return Exchanges((Statistics(first=True),), (Statistics(),), evidence=Evidence(_sent, _received))
