"""FedDM: the server trains on synthetic images into which clients condense their own (Xiong et al., 2023).

Clients send no weights and nothing is averaged. ``fedvck.py`` extends this method to FedVCK. Losses and constants are
those of a public implementation, which is not known to be the authors' (anonymifish/fed-distribution-matching).
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from lightning.fabric import Fabric
from torch import Tensor
from torch.utils.data import DataLoader

from lit_fedad.condensation.batch_statistics import record, unconstrained
from lit_fedad.condensation.condense import Condensation, RealBatch
from lit_fedad.condensation.kernels import class_mmd
from lit_fedad.condensation.training import CondensedTraining, ExtraLoss
from lit_fedad.contracts import Exchanges, Free, Message, MessageSpec, Task, TensorSpec, Update, class_list
from lit_fedad.contracts.disclosure import Disclosure, Disclosures, Kind, counted
from lit_fedad.core.bounds import at_least, within
from lit_fedad.core.errors import UserError, not_there
from lit_fedad.federation.client_runner import Train
from lit_fedad.methods.fedavg import with_exchanges
from lit_fedad.methods.parts.condensed_images import (
    CLASSES,
    COUNTS,
    IMAGES,
    Knowledge,
    as_bytes,
    joined,
    synthetic_images,
)
from lit_fedad.methods.parts.condensed_server import CONDENSED, CondensedClient, CondensedServer
from lit_fedad.methods.parts.functional import frozen, gathered, with_weights
from lit_fedad.tasks.classifier import Classifier


class OwnImages(NamedTuple):
    """A client's images of its owned classes, sorted by class.

    Attributes:
        images: Normalised [n, C, H, W].
        classes: The k owned classes, ascending.
        sizes: Number of images of each class.
    """

    images: Tensor
    classes: list[int]
    sizes: list[int]


class ImageCondenser(CondensedClient):
    """A client that condenses its images class by class, and sends the condensed images.

    It optimises synthetic images to minimise their `class_distance` from the real images of their class. A client owns
    the classes of which it has at least ``min_class_images`` images, and leaves the others out; if it owns none it
    sends no image.

    Args:
        condensation: Steps, batches and learning rate.
        init: Whether synthetic images are initialised as ``noise``, N(0, 1), or as the client's ``real`` images.
        mean: Mean of each channel in [0, 1], for the normalisation of images.
        std: Standard deviation of each channel.
        share: Ratio p of synthetic to real images of a class; the number is rounded up.
        min_synthetic: Fewest synthetic images of a class.
        min_class_images: Fewest images of a class with which a client owns the class.
        quantize: Whether images are sent as bytes, clipped to the range of pixels, or as float32, not clipped.

    Raises:
        UserError: If a setting is out of range.
    """

    def __init__(
        self,
        task: Classifier,
        condensation: Condensation,
        init: Literal["noise", "real"],  # no default, because "real" starts from images of the client
        mean: Sequence[float] = (0.5, 0.5, 0.5),
        std: Sequence[float] = (0.5, 0.5, 0.5),
        share: float = 0.0,
        min_synthetic: int = 10,
        min_class_images: int = 10,
        quantize: bool = True,
    ) -> None:
        super().__init__(task, mean, std, quantize)
        within("method.client", 0, 1, share=share)
        at_least("method.client", 0, min_synthetic=min_synthetic)
        at_least("method.client", 1, min_class_images=min_class_images)
        if share == min_synthetic == 0:
            raise UserError("method.client.share=0 min_synthetic=0 sends no image; raise one of them")
        self.condensation = condensation
        self.share, self.min_synthetic, self.min_class_images = share, min_synthetic, min_class_images
        self.init = init
        self.synthetic = torch.empty(0)
        """The images of the last condensation, normalised and not clipped."""
        self._upload: Message = {}

    def condense(self, loader: DataLoader, fabric: Fabric) -> dict[str, float]:
        """Condenses the client's images of each owned class.

        Args:
            loader: The client's batches, in any order.
            fabric: Device and precision.

        Returns:
            The mean ``loss`` of all steps, and that of the last; empty where no class is owned.

        Raises:
            UserError: If condensation diverges.
        """
        local = self.images_by_class(loader)
        with frozen(self.task):
            sampling_weights, extra_entries = self.survey(local, fabric)
            counts = [synthetic_images(size, self.share, self.min_synthetic) for size in local.sizes]
            synthetic, losses = local.images[:0], list[float]()
            if counts:
                generator = self.context.generator("condensation")
                with self.context.seeded("disturbance"):
                    synthetic, losses = self.condensation(
                        self.initial_images(local, counts, generator),
                        counts,
                        local.images,
                        sampling_weights,
                        lambda real, fake: self.class_distance(real, fake, counts),
                        generator,
                        fabric,
                    )
        self.synthetic = synthetic.cpu()
        pixels = self.synthetic * self.std + self.mean
        self._upload = {
            IMAGES: as_bytes(pixels) if self.quantize else pixels,
            CLASSES: torch.tensor(local.classes, dtype=torch.int64),
            COUNTS: torch.tensor(counts, dtype=torch.int64),
            **extra_entries,
        }
        return {"loss": sum(losses) / len(losses), "last_loss": losses[-1]} if losses else {}

    @property
    def discloses(self) -> Disclosures:  # type: ignore[override]
        """What the condensed images disclose; those initialised as real images count as real images."""
        share = f", or {100 * self.share:g} % of its images where that is more" if self.share else ""
        many = f"{self.min_synthetic} of each class that has at least {self.min_class_images}{share}"
        if self.init == "real":
            what = f"images of the site, {many}, changed by {self.condensation.steps} steps of an optimiser"
            return (Disclosure(Kind.IMAGES, what),)
        what = f"images made from noise to look, to the model, like those of a class: {many}"
        return (
            Disclosure(Kind.SYNTHETIC_IMAGES, what, self.min_class_images),
            counted("numbers of these images by class"),
        )

    def send(self, loader: DataLoader) -> Message:
        """Returns the condensed images and their labels."""
        return self._upload

    def upload_spec(self) -> MessageSpec:
        """Declares any number of images of any number of classes."""
        image = (Free("images"), Free("channels", 4), Free("height"), Free("width"))
        return {
            IMAGES: TensorSpec(image, torch.uint8 if self.quantize else torch.float32, unordered=True),
            CLASSES: class_list(self.task.classes),
            COUNTS: TensorSpec((Free("classes"),), torch.int64, low=1),
        }

    def images_by_class(self, loader: DataLoader) -> OwnImages:
        """Collects the images of owned classes in an order that does not depend on the loader's."""
        images, labels, index = gathered(loader, "image", "label", "index")
        sizes = labels.bincount(minlength=self.task.classes)
        owned = sizes >= self.min_class_images
        order = index.argsort()
        order = order[labels[order].argsort(stable=True)]
        order = order[owned[labels[order]]]
        return OwnImages(images[order], owned.nonzero()[:, 0].tolist(), sizes[owned].tolist())

    def survey(self, local: OwnImages, fabric: Fabric) -> tuple[list[Tensor], Message]:
        """Returns the images' weights in random draws, one tensor [n] a class, and further entries of the upload."""
        return [torch.ones(size) for size in local.sizes], {}

    def initial_images(self, local: OwnImages, counts: Sequence[int], generator: torch.Generator) -> Tensor:
        """Returns the images [sum(counts), C, H, W], sorted by class, that condensation begins with."""
        if self.init == "noise":
            return torch.randn(sum(counts), *local.images.shape[1:], generator=generator)
        chosen = []
        for images, count in zip(local.images.split(local.sizes), counts, strict=True):
            order = torch.randperm(len(images), generator=generator)
            chosen.append(images[order.repeat(-(-count // len(images)))[:count]])
        return torch.cat(chosen)

    def class_distance(self, real: RealBatch, synthetic: Tensor, counts: Sequence[int]) -> Tensor:
        """Computes the loss between the real images of each class and its ``counts`` synthetic ones."""
        raise not_there(self, "class_distance")


class FedDMClient(ImageCondenser):
    """A client that condenses images to match the mean features and mean logits of the real images of each class.

    Features and logits are computed under the received weights plus noise, which is drawn for each step. Three things
    differ from the public code: real and synthetic batches are normalised by their own statistics, not by running ones;
    real images are drawn with replacement; and images are sent as bytes, unless ``quantize`` is off. The differentially
    private variant is not implemented.

    Args:
        radius: Largest norm rho of the noise over all weights; 0 for no noise.
        **condensing: See `ImageCondenser`.

    Raises:
        UserError: If a setting is out of range.
    """

    def __init__(self, task: Classifier, radius: float = 5.0, **condensing: Any) -> None:
        super().__init__(task, **condensing)
        at_least("method.client", 0, radius=radius)
        self.radius = radius

    def class_distance(self, real: RealBatch, synthetic: Tensor, counts: Sequence[int]) -> Tensor:
        """Computes the loss between the real images of each class and its ``counts`` synthetic ones."""
        weights = self._perturbed_weights() if self.radius else {}

        def with_logits(features: Tensor) -> Tensor:
            return torch.cat([features, self.task.classifier(features)], 1)

        def features_of_both(task: Task) -> tuple[Tensor, Tensor]:
            with torch.no_grad():
                real_features = with_logits(record(self.task.encoder, real.images, real.times)[0])
            return real_features, with_logits(unconstrained(self.task.encoder, synthetic))

        real_features, synthetic_features = with_weights(self.task, weights, features_of_both)
        return class_mmd(real_features, synthetic_features, real.times, real.sizes, counts)

    def _perturbed_weights(self) -> Message:
        """Returns the received weights plus normal noise, whose norm is cut to ``radius``."""
        weights = dict(self.task.named_parameters())
        noise = {name: torch.randn(weight.shape).to(weight) for name, weight in weights.items()}
        norm = math.sqrt(sum(float(entry.square().sum()) for entry in noise.values()))
        return {name: weight + min(self.radius / norm, 1) * noise[name] for name, weight in weights.items()}


class FedDMServer(CondensedServer):
    """The server, which trains the current model on the images that clients condensed in the round.

    Args:
        client: A client, for the initial weights and the form of images.
        training: Epochs, batches and learning rate of training in a round.
    """

    advice = (
        "no client of round 1 owns class {}: the model learns nothing of it until one does;"
        " lower method.client.min_class_images"
    )

    merges_sums = False

    def __init__(self, client: ImageCondenser, training: CondensedTraining) -> None:
        super().__init__(client, training)
        self.min_class_images = client.min_class_images
        self.share, self.min_synthetic = client.share, client.min_synthetic
        self.clients = 0

    def register_clients(self, sizes: Mapping[int, int]) -> None:
        """Keeps the number of all clients: the clients of one round may own no class while others own some."""
        self.clients = len(sizes)

    def validate(self, client_id: int, update: Update) -> None:
        """Checks the numbers of images and classes, and that images have the same shape as those of earlier rounds."""
        images, counts, real = update.message[IMAGES], update.message[COUNTS], update.num_samples
        if len(counts) * self.min_class_images > real:
            raise UserError(f"the client sent {len(counts)} classes, and has {real} images")
        if (counts > synthetic_images(real, self.share, self.min_synthetic)).any():
            raise UserError(f"the client counts {int(counts.max())} images of a class, and has {real} of all")
        counted = int(counts.sum())
        if len(images) != counted:
            raise UserError(f"the client sent {len(images)} images and counts {counted}")
        earlier = next((part.images for part in self.knowledge.values() if len(part.images)), None)
        if len(images) and earlier is not None and images.shape[1:] != earlier.shape[1:]:
            raise UserError(
                f"the client sent images {tuple(images.shape[1:])}, not {tuple(earlier.shape[1:])}"
            )

    def aggregate(self, updates: Mapping[int, Update]) -> None:
        """Trains on the clients' images; a round without images changes nothing.

        Raises:
            UserError: If no client owns a class, image sizes differ between clients, or training diverges.
        """
        sent = any(len(update.message[IMAGES]) for update in updates.values())
        if not sent and (self.knowledge or len(updates) < self.clients):
            self.report = {"images": 0.0}
            self._unowned = list(range(self.task.classes))  # `warnings` lists them after round 1
            return
        new = joined({client: update.message for client, update in updates.items()})
        self.learn(new, self.extra_loss([update.message for update in updates.values()]))

    def knowledge_of(self, message: Message) -> Knowledge | None:
        """Returns the images of one upload."""
        return joined({0: message}) if len(message[IMAGES]) else None

    def extra_loss(self, messages: Sequence[Message]) -> ExtraLoss | None:
        """Returns the loss to add to cross-entropy; none here."""
        return None


class Condense(Train):
    """The exchange of a round, in which clients condense their images under the received weights."""

    def train(self, client: ImageCondenser, loader: DataLoader, fabric: Fabric) -> dict[str, float]:  # type: ignore[override]
        """Condenses the client's images by `ImageCondenser.condense`."""
        return client.condense(loader, fabric)


def exchanges(client: ImageCondenser) -> Exchanges:
    """Lists one exchange a round: weights to the clients, condensed images to the server."""
    return with_exchanges(client, rounds=(Condense(),), evidence=CONDENSED)
