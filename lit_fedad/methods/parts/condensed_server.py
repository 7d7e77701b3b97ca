"""A server that trains a classifier on condensed images, whether clients or the server condensed them; its client."""

import math
from collections.abc import Sequence
from copy import deepcopy
from typing import ClassVar

import torch
from torch import Tensor

from lit_fedad.condensation.kernels import mmd
from lit_fedad.condensation.training import CondensedTraining, ExtraLoss
from lit_fedad.contracts import Client, Evidence, Message, Update
from lit_fedad.contracts.evidence import SharedModel, Shown
from lit_fedad.contracts.state import detached
from lit_fedad.core.errors import not_there
from lit_fedad.methods.fedavg import FedAvgServer, ServerModelClient
from lit_fedad.methods.parts.condensed_images import IMAGES, Knowledge, as_bytes
from lit_fedad.methods.parts.functional import apply_in_chunks
from lit_fedad.methods.parts.weight_evidence import invertible_model, weights_received
from lit_fedad.models.encoders import refuse_frozen
from lit_fedad.tasks.classifier import Classifier


class CondensedClient(ServerModelClient):
    """A client that receives weights that the server has trained, and trains none itself.

    Args:
        mean: Mean of each channel in [0, 1], for the normalisation of images.
        std: Standard deviation of each channel.
        quantize: Whether the server's images are bytes, or float32 in the range of pixels, not clipped.

    Raises:
        UserError: If the encoder is frozen.
    """

    needs = Classifier
    task: Classifier

    def __init__(self, task: Classifier, mean: Sequence[float], std: Sequence[float], quantize: bool) -> None:
        super().__init__(task)
        refuse_frozen(task.encoder, "images are condensed through an encoder that is trained on pixels")
        self.mean, self.std = (torch.tensor(list(values)).view(-1, 1, 1) for values in (mean, std))
        self.quantize = quantize

    def shown(self, sent: Message) -> list[Shown]:
        """Lists what an upload shows of single images: the model that the server can train on the images in it."""
        return [SharedModel()] if IMAGES in sent else []


class CondensedServer(FedAvgServer):
    """A server that trains the current model on condensed images.

    It reports number and size of the round's images, training loss and accuracy, and ``knowledge_mmd``: the mean over
    classes of the Gaussian MMD^2 between the features of this and the last round's images under the new weights.
    ``knowledge_mmd_random`` is the same under the initial weights.

    Args:
        client: A client, for the initial weights and the form of images.
        training: Epochs, batches and learning rate of training in a round.

    Attributes:
        knowledge: The images that the server trains on, by the round in which they came.
        rounds_kept: Number of latest rounds whose images are used; None for all.
        advice: The warning after round 1 about classes without an image; ``{}`` stands for the numbers of the classes.
    """

    state_names = ("knowledge",)
    advice: ClassVar[str]

    def __init__(self, client: CondensedClient, training: CondensedTraining) -> None:
        super().__init__(client)
        self.task = deepcopy(client.task)
        self.mean, self.std, self.quantize = client.mean, client.std, client.quantize
        self.training = training
        self.rounds_kept: int | None = 1
        self.initial = self.weights
        self.knowledge: dict[int, Knowledge] = {}
        self._unowned: list[int] = []

    def learn(self, new: Knowledge, extra: ExtraLoss | None) -> None:
        """Trains on the images of this round, and those of earlier ones that are kept.

        Args:
            new: Images of this round.
            extra: Loss to add to cross-entropy.

        Raises:
            UserError: If training diverges.
        """
        last = self.knowledge.get(max(self.knowledge, default=0))
        by_round = {**self.knowledge, self.context.round: new}
        self.knowledge = dict(sorted(by_round.items())[-(self.rounds_kept or len(by_round)) :])
        mib = new.images.numel() / 2**20  # at one byte per value, and at four
        self.report = {"images": float(len(new.labels)), "images_mib": mib, "images_mib_float32": 4 * mib}
        self.weights, training_report = self._train(list(self.knowledge.values()), extra)
        self.report |= training_report
        if last is not None:
            models = {"knowledge_mmd": self.weights, "knowledge_mmd_random": self.initial}
            self.report |= {name: self._distance(last, new, weights) for name, weights in models.items()}
        seen = torch.cat([part.labels for part in self.knowledge.values()]).unique().tolist()
        self._unowned = [label for label in range(self.task.classes) if label not in seen]

    def knowledge_of(self, message: Message) -> Knowledge | None:
        """Returns the condensed images that an observer gets from one upload; None for none."""
        raise not_there(self, "knowledge_of")

    def trained_on(self, message: Message) -> Message:
        """Trains the current weights on the images of one upload alone, and returns them."""
        images = self.knowledge_of(message)
        return self.weights if images is None else self._train([images], None)[0]

    def _train(
        self, knowledge: Sequence[Knowledge], extra: ExtraLoss | None
    ) -> tuple[Message, dict[str, float]]:
        """Trains from the current weights on condensed images; returns the new weights and scalars to track."""
        task, fabric = self.task, self.launched
        task.load_state_dict(self.weights, strict=False)
        task.to(fabric.device)
        images, labels = (torch.cat(parts) for parts in zip(*knowledge, strict=True))
        with self.context.seeded("condensed training"):  # dropout draws random numbers
            report = self.training(
                task,
                lambda batch: task({"image": batch}),
                task.classifier,
                images,
                labels,
                self._normalised,
                self.context.generator("condensed training"),
                fabric,
                extra,
            )
        state = task.to("cpu").state_dict()
        return detached({name: state[name] for name in self.weights}), report

    def _normalised(self, images: Tensor) -> Tensor:
        """Normalises condensed images."""
        pixels = images / 255 if self.quantize else images
        return (pixels - self.mean.to(images.device)) / self.std.to(images.device)

    def _features(self, images: Tensor, weights: Message) -> Tensor:
        """Computes features [n, D] of condensed images, in evaluation mode."""

        def features(batch: Tensor) -> Tensor:
            with self.launched.autocast():
                return self.task({"image": self._normalised(batch)}).float().cpu()

        self.task.to(self.launched.device)
        parts = apply_in_chunks(self.task, weights, images, features)
        self.task.to("cpu")
        return torch.cat(parts)

    def _distance(self, last: Knowledge, new: Knowledge, weights: Message) -> float:
        """Computes the mean MMD^2 between two rounds' features over their common classes (FedVCK, appendix)."""
        rounds = [(self._features(part.images, weights), part.labels) for part in (last, new)]
        classes = set(last.labels.tolist()) & set(new.labels.tolist())
        pairs = [[features[labels == label] for features, labels in rounds] for label in sorted(classes)]
        distances = [float(mmd(before, after, "gaussian")) for before, after in pairs]
        return sum(distances) / len(distances) if distances else math.nan

    def images_by_round(self) -> dict[int, Knowledge]:
        """Returns the training images as uint8, by round."""
        return {
            round: Knowledge(images if self.quantize else as_bytes(images), labels)
            for round, (images, labels) in self.knowledge.items()
        }

    def warnings(self) -> list[str]:
        """Returns, once, one line that lists the classes without an image."""
        if not self._unowned or self.context.round > 1:
            return []
        names = ", ".join(map(str, self._unowned))
        return [self.advice.format(names)]


def predict_with_images(server: CondensedServer, client: Client, update: Update) -> None:
    """Trains the model that the client received on the images of one upload; see `Evidence`."""
    client.task.load_state_dict(server.trained_on(update.message), strict=False)


CONDENSED = Evidence(
    lambda client, received, sent: client.shown(sent), weights_received, predict_with_images, invertible_model
)
"""What condensed images show of single images."""
