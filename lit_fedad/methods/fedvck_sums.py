"""FedVCK by sums: clients send class sums of features, and the server condenses images that have the same means.

With a linear kernel, FedVCK (Yan et al., AAAI 2025) matches mean features. Here these means leave a client, as sums
over its images: they add up under secure aggregation, noise on them bounds what they say of any image, and no client
sends pictures that resemble its own. Of FedVCK remain the importance of images, condensation, and training on the
images of all rounds. Left out are its batch statistics, since none are sent, and its relational contrast, which needs
the mean logits of classes beside their features.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lit_fedad.condensation.batch_statistics import check_encoder
from lit_fedad.condensation.descent import Descent
from lit_fedad.condensation.training import CondensedTraining
from lit_fedad.contracts import Additive, Client, Exchanges, Message, MessageSpec, TensorSpec, Update
from lit_fedad.errors import UserError
from lit_fedad.federation.additive import BoundedSums
from lit_fedad.federation.local_training import Answer
from lit_fedad.federation.noised_sums import clipped_sum
from lit_fedad.guards.bounds import at_least, pair, within
from lit_fedad.methods.parts.class_embeddings import (
    LONGEST,
    MASS,
    TOTAL,
    ClassEmbeddings,
    embeddings,
    fewest_images,
    longest_embedding,
    mean_embeddings,
)
from lit_fedad.methods.parts.condensed_images import Knowledge
from lit_fedad.methods.parts.condensed_server import CondensedClient, CondensedServer
from lit_fedad.methods.parts.functional import evaluating, frozen
from lit_fedad.tasks.classifier import Classifier

_TOLERANCE = 1e-3  # of lengths that went through float32, or through fixed point


class Embeddings(Answer):
    """The exchange of a round: weights to the clients, sums of their embeddings to the server."""

    name = "embeddings"

    def image_sums(self, client: Client) -> ClassEmbeddings:
        """Declares the sums over images."""
        assert isinstance(client, FedVCKSumsClient)
        return ClassEmbeddings(client)


class FedVCKSumsClient(CondensedClient):
    """A client that sends, for each class, the sum of its images' features at length 1, weighted by importance.

    Args:
        task: A `Classifier` whose encoder has batch normalisation.
        mean: Mean of each channel in [0, 1], for the normalisation of images.
        std: Standard deviation of each channel.
        alpha: Share of the current model in the mixed logits of `importance`.
        bias: Its bias b.

    Raises:
        UserError: If the encoder has no batch normalisation, or a setting is out of range.
    """

    kept: ClassVar[tuple[str, ...]] = ("previous",)

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
        check_encoder(task.encoder)
        self.alpha, self.bias = alpha, bias
        self.previous: Message = {}

    @property
    def exchanges(self) -> Exchanges:
        """One exchange a round."""
        return replace(super().exchanges, rounds=(Embeddings(),))

    def send(self, loader: DataLoader) -> Message:
        """Returns ``total`` [K, D] and ``mass`` [K] of the client's images."""
        sums = clipped_sum(ClassEmbeddings(self), loader, clip=LONGEST)
        return {name: part.float() for name, part in sums.items()}

    def upload_spec(self) -> MessageSpec:
        """Declares the sums; both grow with a client's images."""
        form = ClassEmbeddings(self).form()
        return {
            TOTAL: TensorSpec(form[TOTAL], counted=True),
            MASS: TensorSpec(form[MASS], low=0, counted=True),
        }

    def additive(self) -> Additive:
        """Declares sums of parts of bounded length."""
        return BoundedSums(ClassEmbeddings(self).form(), LONGEST)


class FedVCKSumsServer(CondensedServer):
    """The server, which condenses images to the mean embeddings of all clients, and trains on those of all rounds.

    Synthetic images begin as noise and follow the gradient of the squared distance between the mean of their embeddings
    and that of the real images, class by class (FedVCK Eq. 9 with a linear kernel). Real and synthetic images are
    normalised by the same running statistics, those of the weights that the clients received.

    Args:
        client: A client, for the initial weights.
        training: Epochs, batches and learning rate of training in a round.
        descent: Steps and learning rate of condensation.
        images: Synthetic images of a class and round.
        channels: Channels of images.
        size: Height and width of images in pixels, or one length for both.
        rounds_kept: Number of latest rounds whose images are used; None for all (FedVCK Eq. 16).

    Raises:
        UserError: If a setting is out of range, or the model takes no images of this form.
    """

    adds_up = True
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
        self.form = (channels, *pair("method.server.size", size))
        self._check_form()

    def _check_form(self) -> None:
        """Refuses images that the model does not take."""
        try:
            with torch.no_grad(), evaluating(self.task):
                self.task.classifier(self.task({"image": torch.zeros(1, *self.form)}))
        except RuntimeError:
            channels, *size = self.form
            raise UserError(
                f"method.server.channels={channels} size={size}: the model takes no such images; leave both keys out"
            ) from None

    def validate(self, client_id: int, update: Update) -> None:
        """Checks that the client has as many images as it sums, and that its mean embeddings are no longer than 1."""
        counted = fewest_images(update.message)
        if counted > update.num_samples * (1 + _TOLERANCE):
            raise UserError(f"the client sums at least {counted:.1f} images, and has {update.num_samples}")
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
        knowledge, loss = self._condensed(sums)
        self.learn(knowledge, None)
        self.report["condensation_loss"] = loss

    def knowledge_of(self, message: Message) -> Knowledge | None:
        """Condenses images to the mean embeddings of one upload."""
        return self._condensed(message)[0] if bool((message[MASS] > 0).any()) else None

    def _condensed(self, sums: Message) -> tuple[Knowledge, float]:
        """Returns images that have the mean embeddings of some sums, and their distance after the last step."""
        classes, targets = mean_embeddings(sums)
        if not len(classes):
            raise UserError("no client has sent the sum of an image")
        task, fabric, generator = self.task, self._launched, self.context.generator("condensation")
        task.load_state_dict(self.weights, strict=False)
        task.to(fabric.device)
        targets = targets.to(fabric.device)
        noise = torch.randn(len(classes) * self.images, *self.form, generator=generator)

        def distance(images: Tensor) -> Tensor:
            found = embeddings(task({"image": images}).float())
            return (found.unflatten(0, (len(classes), self.images)).mean(1) - targets).square().sum()

        with frozen(task), evaluating(task):
            images, losses = self.descent(noise, distance, fabric)
        task.to("cpu")
        pixels = images.cpu() * self.std + self.mean
        return Knowledge(pixels, classes.repeat_interleave(self.images)), losses[-1] if losses else 0.0
