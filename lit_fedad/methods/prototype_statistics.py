"""Prototype statistics: clients send class means and one covariance; the classifier follows in closed form.

This is federated linear discriminant analysis of frozen features. Counts, means and scatters add up over clients and
stages, so that the classifier is that of one client with all images, whatever the partition and the order of stages:
nothing is forgotten. Nothing is trained, and in rounds clients send only the statistics of images that have come since.
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

_ROOT_3 = math.sqrt(3)


class ImagePrototypes:
    """The sums ``count`` [K], ``total`` [K, C] and ``product`` [C (C + 1) / 2], each divided by the root of 3.

    One-hot label, feature and products of features have norm 1 each, so that every image adds a vector of norm 1 in
    all. Clipping to a smaller norm would shorten all vectors by the same factor, which changes nothing.

    Args:
        client: The client, for its features and classes; it keeps the counts of its own labels.
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
        rows, columns, factors = triangle(channels)
        counts = torch.zeros_like(client.own_counts)

        def features(batch: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
            return self.task(batch).double().cpu() / client.length, batch["label"].cpu()

        for vectors, labels in map_batches(self.task, loader, features):
            one_hot = torch.nn.functional.one_hot(labels, self.task.classes).double()
            counts = counts + one_hot.sum(0)
            yield {
                "count": one_hot / _ROOT_3,
                "total": one_hot[:, :, None] * vectors[:, None] / _ROOT_3,
                "product": vectors[:, rows] * vectors[:, columns] * factors.double() / _ROOT_3,
            }
        client.own_counts = counts

    def from_sums(self, server: Any, sums: Mapping[str, Tensor], noise: float) -> Message:
        """Computes ``count`` [1, K], ``mean`` [1, K, C] and ``within`` [1, C (C + 1) / 2] of all images.

        Classes whose count lies within three standard deviations of the noise are treated as empty.

        Raises:
            HiddenByNoiseError: If this holds for all classes.
        """
        counts = _ROOT_3 * sums["count"]
        shown = counts > max(0.5, 3 * _ROOT_3 * noise) if noise > 0 else counts > 0
        if not shown.any():
            raise HiddenByNoiseError
        counts = torch.where(shown, counts, 0.0)
        mean = torch.where(shown[:, None], _ROOT_3 * sums["total"] / counts.clamp(min=1e-9)[:, None], 0.0)
        images = counts.sum()
        product = from_triangle(_ROOT_3 * sums["product"] / images, mean.shape[1])
        within = without_negative(product - (mean.T * counts / images) @ mean)
        return {
            "count": counts.round().clamp(min=1).where(shown, 0.0).long()[None],
            "mean": mean.clamp(-1, 1).float()[None],
            "within": upper_triangle(within).clamp(-1, 1).float()[None],
        }


_LENGTH_TOLERANCE = 0.01  # cached features are in half precision
_RARE = 1e-6  # share that the own prior gives to classes that a client has never had

_ABSENT = -1e6
"""Offset of the logit of a class without images from the smallest logit that any other class can have."""
_LEAST_RIDGE = 1e-8
"""Least value that is added to the variances, which are 0 if each class has a single image."""


class Statistics(Exchange[Any, Any]):
    """The exchange in which clients send the statistics of a stage that has begun, if any.

    Args:
        first: Whether the exchange comes before round 1; later ones send statistics only if data come in stages.
    """

    name = "statistics"

    def __init__(self, first: bool = False) -> None:
        # Under differential privacy there are no stages.
        self.sums = Sums(lambda client: PrototypeSums(), ImagePrototypes if first else _nothing_new)


class PrototypeStatisticsClient(Client):
    """A client that sends statistics of its features by class, and predicts with the classifier of all clients.

    Args:
        task: A classifier whose encoder is a frozen one without a network of its own (``features.hidden=0``).
        prior: Class frequencies that a deployed client expects: equal ones (``balanced``) or its ``own``.

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
        """The server's classifier, and as head ``prior`` this classifier with the client's own class frequencies."""
        return Predictors(own=False, heads=("prior",))

    def receive(self, message: Message) -> None:
        """Loads the classifier, if there is one yet."""
        if len(message["weight"]):
            self.task.classifier.weight.data.copy_(message["weight"][0] / self.length)
            self.task.classifier.bias.data.copy_(message["bias"][0])

    def predict_step(self, batch: Mapping[str, Any], batch_idx: int = 0) -> Prediction:
        """Predicts with equal class frequencies, and with the client's own (``prior``)."""
        with full_precision(self.task.classifier.weight):
            balanced = self.task.predict_step(batch)
        assert balanced.logits is not None
        own_prior = (self.own_counts / self.own_counts.sum().clamp(min=1)).clamp(min=_RARE)
        own_logits = balanced.logits + own_prior.log().to(balanced.logits)
        logits = balanced.logits if self.prior == "balanced" else own_logits
        return Prediction(uncertainty(logits), logits=logits, others={"prior": own_logits})

    def broadcast_spec(self) -> MessageSpec:
        """Declares a classifier, or none."""
        known, shape = Free("classifiers", 1), tuple(self.task.classifier.weight.shape)
        return {"weight": TensorSpec((known, *shape)), "bias": TensorSpec((known, shape[0]))}

    discloses = (by_class("count and mean of the features of each class, and their covariance"),)

    @torch.no_grad()
    def send(self, loader: DataLoader) -> Message:
        """Returns ``count`` [n, K], ``mean`` [n, K, C] and ``within`` [n, C (C + 1) / 2] of the images of a new stage.

        n is 1 in the first message of each stage, and 0 later. ``within`` is the covariance of features around the
        means of their classes. Features are scaled to length 1.
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
        centred = features - mean[labels]
        self.own_counts = self.own_counts + count
        return {
            "count": count[None],
            "mean": mean.float()[None],
            "within": upper_triangle(centred.T @ centred / len(labels)).float()[None],
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
    """The server, which adds up statistics and computes the classifier.

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
        """Checks that counts add up to the client's images, variances are valid and features have length 1."""
        for count, mean, within in _parts(update.message):
            if int(count.sum()) != update.num_samples:
                raise UserError(f"the client counts {int(count.sum())} images of its {update.num_samples}")
            check_covariance(within)
            # Squares of the means and variances around them add up to the mean square length of features, which is 1.
            length = float(within.trace() + (count / count.sum()) @ mean.square().sum(1))
            if abs(length - 1) > _LENGTH_TOLERANCE:
                raise UserError(f"the client's features have a mean square length of {length:.3g}, not 1")

    def aggregate(self, updates: Mapping[int, Update]) -> None:
        """Adds up the statistics, and computes the classifier if any are new."""
        for update in updates.values():
            for part in _parts(update.message):
                self.add(*part)
        if any(len(update.message["count"]) for update in updates.values()):
            self.learn()

    def add(self, count: Tensor, mean: Tensor, within: Tensor) -> None:
        """Adds the statistics of further images: counts [K], means [K, C] and their covariance within classes [C, C].

        The scatter of two sets around their common mean exceeds the sum of their own scatters by
        ``n_1 n_2 / (n_1 + n_2) d d^T``, with d the difference of their means.
        """
        total = (self.count + count).clamp(min=1)
        difference = mean - self.mean
        between = (difference.T * (self.count * count / total)) @ difference
        self.scatter = self.scatter + count.sum() * within + between
        self.mean = self.mean + (count / total)[:, None] * difference
        self.count = self.count + count

    def learn(self) -> None:
        """Computes linear discriminants ``S^-1 (m_k - m)`` and ``-(m_k - m)^T S^-1 (m_k + m) / 2``.

        S is the covariance within classes, m the mean of the classes' means m_k. All classes have the same prior.
        """
        within = self.scatter / self.count.sum()
        ridge = (self.shrinkage * within.diagonal().mean()).clamp(min=_LEAST_RIDGE)
        within = within + ridge * torch.eye(len(within), dtype=within.dtype)
        known = self.count > 0
        # The part that all discriminants share is left out: it decides nothing, and its rounding could hide the rest.
        centre = self.mean[known].mean(0)
        offsets = torch.where(known[:, None], self.mean - centre, 0.0)
        weight = torch.linalg.solve(within, offsets.T).T
        bias = -(weight * (self.mean + centre)).sum(1) / 2
        least_logit = (bias - weight.norm(dim=1))[known].min()  # over all features of length 1
        bias = torch.where(known, bias, least_logit + _ABSENT)
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
    """Lists what an upload shows of single images: the means of classes, and the moments of all features."""
    shown, task = list[Shown](), client.task

    def features(batch: Mapping[str, Any]) -> Tensor:
        return task(batch) / client.length

    for count, mean, within in _parts(sent):
        filled, shares = count > 0, count / count.sum()
        centre = shares @ mean
        between = (mean.T * shares) @ mean - centre.outer(centre)
        shown += [
            SharedPrototypes(mean[filled], filled.nonzero().flatten(), features),
            SharedMoments(centre, within + between, lambda batch: features(batch)[:, None].cpu()),
        ]
    return shown


def _received(client: PrototypeStatisticsClient, received: Message) -> list[Shown]:
    """Lists what the server's message shows of single images: the classifier of all clients, if there is one yet."""
    return [SharedModel()] if len(received["weight"]) else []


def exchanges(client: PrototypeStatisticsClient) -> Exchanges:
    """Lists statistics before round 1; in rounds those of new images."""
    return Exchanges((Statistics(first=True),), (Statistics(),), evidence=Evidence(_sent, _received))
