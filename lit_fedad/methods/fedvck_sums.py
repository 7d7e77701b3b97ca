"""FedVCK by sums: clients send class sums of features, and the server condenses images that have the same means.

With a linear kernel, FedVCK (Yan et al., AAAI 2025) matches mean features. Here clients send these means, as sums over
their images. Such sums add up under secure aggregation, noise on them bounds what they reveal of any image, and no
client sends pictures that resemble its own. This method keeps FedVCK's importance of images, its condensation, and its
training on the images of all rounds. It leaves out batch statistics, since none are sent, and relational contrast,
which needs the mean logits of classes beside their features.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lit_fedad.condensation.batch_statistics import check_encoder
from lit_fedad.condensation.condense import Descent
from lit_fedad.condensation.relations import importance
from lit_fedad.condensation.training import CondensedTraining
from lit_fedad.contracts import Exchange, Exchanges, Message, MessageSpec, Sums, TensorSpec, Update
from lit_fedad.contracts.compute import map_batches
from lit_fedad.contracts.disclosure import by_class
from lit_fedad.contracts.sums import BoundedSums, HiddenByNoiseError
from lit_fedad.core.bounds import at_least, pair, within
from lit_fedad.core.errors import UserError
from lit_fedad.methods.fedavg import with_exchanges
from lit_fedad.methods.parts.condensed_images import Knowledge
from lit_fedad.methods.parts.condensed_server import CONDENSED, CondensedClient, CondensedServer
from lit_fedad.methods.parts.functional import evaluating, frozen, with_weights
from lit_fedad.privacy.noised_sums import clipped_sum
from lit_fedad.tasks.classifier import Classifier

TOTAL, MASS = "total", "mass"

CONSTANT = 0.3
"""The entry beside the embedding in an image's vector. If it is small, more of the vector's length is the embedding's,
and less the entry's, from which the weight of a class follows."""

LONGEST = 0.5
"""Largest length of the vector that one image adds to the sums."""

_VECTOR_LENGTH = math.sqrt(1 + CONSTANT**2)  # of an embedding of length 1 and the constant beside it


class ClassEmbeddings:
    """The sums ``total`` [K, D] and ``mass`` [K] of importance-weighted embeddings, by class.

    Args:
        client: The client, for its current and previous model. When its images have been summed, the current model
            becomes the previous one.
    """

    def __init__(self, client: FedVCKSumsClient) -> None:
        self.client, self.task = client, client.task

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Declares the sums."""
        return {TOTAL: (self.task.classes, self.task.num_features), MASS: (self.task.classes,)}

    @torch.no_grad()
    def per_image(self, loader: Iterable[Any]) -> Iterator[dict[str, Tensor]]:
        """Yields what the images of each batch add, weighted by their `importance`."""
        task, client = self.task, self.client
        previous = {name: entry.to(task.device) for name, entry in client.previous.items()}

        def embedded(batch: Mapping[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
            features, labels = task(batch).float(), batch["label"]
            logits = task.classifier(features)
            previous_logits = logits
            if previous:
                previous_logits = with_weights(task, previous, lambda _: task.classifier(task(batch).float()))
            weights = importance(logits, previous_logits, labels, client.alpha, client.bias)
            return F.normalize(features, dim=1).double().cpu(), weights.double().cpu(), labels.cpu()

        task.eval()
        for vectors, weights, labels in map_batches(task, loader, embedded):
            rows = LONGEST / _VECTOR_LENGTH * weights[:, None] * F.one_hot(labels, task.classes).double()
            yield {TOTAL: rows[:, :, None] * vectors[:, None], MASS: CONSTANT * rows}
        client.previous = client.shared_state()

    def from_sums(self, server: Any, sums: Mapping[str, Tensor], noise: float) -> Message:
        """Returns the sums, with zeros for classes whose mass lies within three deviations of the noise.

        Raises:
            HiddenByNoiseError: If the masses of all classes do.
        """
        shown = sums[MASS] > 3 * noise
        if not shown.any():
            raise HiddenByNoiseError
        return {
            TOTAL: torch.where(shown[:, None], sums[TOTAL], 0.0),
            MASS: torch.where(shown, sums[MASS], 0.0),
        }


def mean_embeddings(sums: Message) -> tuple[Tensor, Tensor]:
    """Computes the mean embeddings of the classes that have images in the sums.

    Args:
        sums: ``total`` [K, D] and ``mass`` [K].

    Returns:
        The k classes, int64 [k], and their importance-weighted mean embeddings, float32 [k, D].
    """
    classes = (sums[MASS] > 0).nonzero()[:, 0]
    total, mass = sums[TOTAL].double()[classes], sums[MASS].double()[classes]
    return classes, (CONSTANT * total / mass[:, None]).float()


def fewest_images(sums: Message) -> float:
    """Computes the fewest images that can have the ``mass`` of some sums: their number if all have importance 1."""
    return float(sums[MASS].double().sum()) * _VECTOR_LENGTH / (LONGEST * CONSTANT)


def longest_embedding(sums: Message) -> float:
    """Computes the length of the longest mean embedding; no images have sums with one above 1."""
    lengths, mass = sums[TOTAL].double().norm(dim=1), sums[MASS].double()
    return float((CONSTANT * lengths / mass.clamp(min=1e-9)).max())


_TOLERANCE = 1e-3  # for rounding to float32, or to fixed point


class Embeddings(Exchange[Any, Any]):
    """The exchange of a round: weights to the clients, sums of their embeddings to the server."""

    name = "embeddings"

    sums = Sums(lambda client: BoundedSums(ClassEmbeddings(client).shapes(), LONGEST), ClassEmbeddings)


class FedVCKSumsClient(CondensedClient):
    """A client that sends, for each class, the sum of its images' features at length 1, weighted by importance.

    Args:
        task: A `Classifier` whose encoder has batch normalisation.
        mean: Mean of each channel in [0, 1], for the normalisation of images.
        std: Standard deviation of each channel.
        alpha: Share of the current model in the mixed logits of `importance`.
        bias: Bias b of `importance`.

    Raises:
        UserError: If the encoder has no batch normalisation, or a setting is out of range.
    """

    state_names: ClassVar[tuple[str, ...]] = ("previous",)

    def __init__(
        self,
        task: Classifier,
        mean: Sequence[float] = (0.5, 0.5, 0.5),
        std: Sequence[float] = (0.5, 0.5, 0.5),
        alpha: float = 0.5,
        bias: float = 0.0,
    ) -> None:
        super().__init__(task, mean, std, quantize=False)
        within("method.client", 0, 1, alpha=alpha)
        within("method.client", -50, 50, bias=bias)  # far above any cross-entropy, all importances would be 0
        check_encoder(task.encoder)
        self.alpha, self.bias = alpha, bias
        self.previous: Message = {}

    discloses = (by_class("sums of the features of each class, weighted by importance"),)

    def send(self, loader: DataLoader) -> Message:
        """Returns ``total`` [K, D] and ``mass`` [K] of the client's images."""
        sums = clipped_sum(ClassEmbeddings(self), loader, clip=LONGEST)
        return {name: part.float() for name, part in sums.items()}

    def upload_spec(self) -> MessageSpec:
        """Declares the sums; both grow with a client's images."""
        shapes = ClassEmbeddings(self).shapes()
        return {
            TOTAL: TensorSpec(shapes[TOTAL], counted=True),
            MASS: TensorSpec(shapes[MASS], low=0, counted=True),
        }


class FedVCKSumsServer(CondensedServer):
    """The server, which condenses images to the mean embeddings of all clients, and trains on those of all rounds.

    Synthetic images begin as noise and follow the gradient of the squared distance between the mean of their embeddings
    and that of the real images, class by class (FedVCK Eq. 9 with a linear kernel). Real and synthetic images are
    normalised by the same running statistics, those of the weights that the clients received.

    Args:
        training: Epochs, batches and learning rate of training in a round.
        descent: Steps and learning rate of condensation.
        images: Number of synthetic images of each class in a round.
        channels: Channels of images.
        size: Height and width of images in pixels, or one length for both.
        rounds_kept: Number of latest rounds whose images are used; None for all (FedVCK Eq. 16).

    Raises:
        UserError: If a setting is out of range, or the model takes no images of this shape.
    """

    merges_sums = True
    advice = "no image of class {} showed in round 1: the model learns nothing of it"

    def __init__(
        self,
        client: FedVCKSumsClient,
        training: CondensedTraining,
        descent: Descent,
        images: int = 10,
        channels: int = 3,
        size: int | Sequence[int] = 32,
        rounds_kept: int | None = None,
    ) -> None:
        super().__init__(client, training)
        at_least("method.server", 1, images=images, channels=channels, rounds_kept=rounds_kept)
        self.descent, self.images, self.rounds_kept = descent, images, rounds_kept
        self.image_shape = (channels, *pair("method.server.size", size))
        self._check_image_shape()

    def _check_image_shape(self) -> None:
        """Checks that the model takes images of the configured shape."""
        try:
            with torch.no_grad(), evaluating(self.task):
                self.task.classifier(self.task({"image": torch.zeros(1, *self.image_shape)}))
        except RuntimeError:
            channels, *size = self.image_shape
            raise UserError(
                f"method.server.channels={channels} size={size}: the model takes no such images; leave both keys out"
            ) from None

    def validate(self, client_id: int, update: Update) -> None:
        """Checks that the client sums no more images than it has, and that its mean embeddings are no longer than 1."""
        summed_images = fewest_images(update.message)
        if summed_images > update.num_samples * (1 + _TOLERANCE):
            raise UserError(
                f"the client sums at least {summed_images:.1f} images, and has {update.num_samples}"
            )
        if (length := longest_embedding(update.message)) > 1 + _TOLERANCE:
            raise UserError(f"the client's embeddings of a class have a mean of length {length:.4g}, above 1")

    def aggregate(self, updates: Mapping[int, Update]) -> None:
        """Condenses images to the mean embeddings of all clients, and trains.

        Raises:
            UserError: If no image has been summed, or condensation or training diverges.
        """
        sums = {
            name: torch.stack([update.message[name].double() for update in updates.values()]).sum(0)
            for name in (TOTAL, MASS)
        }
        knowledge, loss = self._condense(sums)
        self.learn(knowledge, None)
        self.report["condensation_loss"] = loss

    def knowledge_of(self, message: Message) -> Knowledge | None:
        """Condenses images to the mean embeddings of one upload."""
        return self._condense(message)[0] if bool((message[MASS] > 0).any()) else None

    def _condense(self, sums: Message) -> tuple[Knowledge, float]:
        """Condenses images to the mean embeddings of some sums; returns them and the loss of the last step."""
        classes, targets = mean_embeddings(sums)
        if not len(classes):
            raise UserError("no client has sent the sum of an image")
        task, fabric, generator = self.task, self.launched, self.context.generator("condensation")
        task.load_state_dict(self.weights, strict=False)
        task.to(fabric.device)
        targets = targets.to(fabric.device)
        noise = torch.randn(len(classes) * self.images, *self.image_shape, generator=generator)

        def distance(images: Tensor) -> Tensor:
            embeddings = F.normalize(task({"image": images}).float(), dim=1)
            return (embeddings.unflatten(0, (len(classes), self.images)).mean(1) - targets).square().sum()

        with frozen(task), evaluating(task):
            images, losses = self.descent.descend(noise, distance, fabric)
        task.to("cpu")
        pixels = images.cpu() * self.std + self.mean
        return Knowledge(pixels, classes.repeat_interleave(self.images)), losses[-1] if losses else 0.0


def exchanges(client: FedVCKSumsClient) -> Exchanges:
    """Lists one exchange a round: weights to the clients, sums of embeddings to the server."""
    return with_exchanges(client, rounds=(Embeddings(),), evidence=CONDENSED)
