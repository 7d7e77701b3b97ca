"""DeSA: clients align and distil on anchors, images that all of them have condensed (Huang et al., ICML 2024).

arXiv 2405.11525. Before round 1 each client condenses images of its classes under random networks. Every client then
receives the mean of these images over clients: the anchors. The original has no server: every client keeps a model of
its own. FedVCK counts DeSA among the methods that send the model up and down (FedVCK Table 10). So here weights are
averaged as in FedAvg, and the server computes the logits of the anchors under the models that it has received. Losses
and constants are those of the released code.
"""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
from lightning.fabric import Fabric
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lit_fedad.condensation.batch_statistics import record, unconstrained
from lit_fedad.condensation.condense import Condensation, RealBatch
from lit_fedad.condensation.kernels import class_mmd
from lit_fedad.contracts import Exchange, Exchanges, Free, Message, MessageSpec, TensorSpec, Update
from lit_fedad.contracts.compute import full_precision
from lit_fedad.contracts.disclosure import DisclosedBy
from lit_fedad.core.bounds import above, at_least, within
from lit_fedad.core.errors import UserError
from lit_fedad.methods.fedavg import FedAvgClient, FedAvgServer, with_exchanges
from lit_fedad.methods.feddm import ImageCondenser
from lit_fedad.methods.parts.condensed_images import COUNTS, IMAGES, joined
from lit_fedad.methods.parts.functional import apply_in_chunks, draw_weights
from lit_fedad.tasks.classifier import Classifier

ANCHORS, LABELS, LOGITS = "anchors", "anchor_labels", "anchor_logits"


class AnchorCondenser(ImageCondenser):
    """Condenses a client's images as FedDM does, but by features of a network that gets new random weights each step.

    The network has the architecture of the task's encoder.
    """

    def condense(self, loader: DataLoader, fabric: Fabric) -> dict[str, float]:
        """Condenses under copies of the encoder; see `ImageCondenser.condense`."""
        self._random = deepcopy(self.task.encoder).to(fabric.device).requires_grad_(False)
        report = super().condense(loader, fabric)
        del self._random  # not a part of the client
        return report

    def normalised(self, images: Tensor) -> Tensor:
        """Normalises images that were sent as bytes [n, C, H, W]."""
        return (images / 255 - self.mean) / self.std

    def class_distance(self, real: RealBatch, synthetic: Tensor, counts: Sequence[int]) -> Tensor:
        """Computes the squared distance of mean features, class by class."""
        draw_weights(self._random)
        target = record(self._random, real.images, real.times)[0]
        return class_mmd(target, unconstrained(self._random, synthetic), real.times, real.sizes, counts)


class DESAClient(FedAvgClient):
    """A client that trains on its images x and, in each step, on a batch of anchors a too.

    It minimises ``CE(x, y) + anchor_weight CE(a, y_a) + distillation KD(a, y_a) + contrast SupCon(x, a)``. From round
    2, KD is ``(1 - soft_share) CE + soft_share T^2 mean_ik p_ik log(p_ik / q_ik)``: p is the softmax at temperature T
    of the other clients' mean logits of the last round, q that of the client's own logits. SupCon is
    `supervised_contrast` of the features of images and anchors, without gradient through the features of anchors.

    Args:
        task: A `Classifier` of pixels.
        condensation: Steps, batches and learning rate of the anchors.
        mean: Mean of each channel in [0, 1], for the normalisation of images.
        std: Standard deviation of each channel.
        anchors: Number of anchors of each class.
        min_class_images: Fewest images of a class with which a client owns the class: it condenses its owned classes.
        batch_size: Anchors in each step.
        anchor_weight: Weight of the anchors' cross-entropy.
        distillation: Weight of KD.
        contrast: Weight of SupCon; with all three weights 0, training is FedAvg's.
        temperature: Temperature T of KD.
        soft_share: Share of the other clients' predictions in KD; the rest is the labels'.
        contrast_temperature: Temperature of SupCon.

    Raises:
        UserError: If the encoder is frozen, or a setting is out of range.
    """

    needs = Classifier
    state_names = ("anchors", "labels")
    task: Classifier

    def __init__(
        self,
        task: Classifier,
        condensation: Condensation,
        mean: Sequence[float] = (0.5, 0.5, 0.5),
        std: Sequence[float] = (0.5, 0.5, 0.5),
        local_epochs: int = 1,
        anchors: int = 10,
        min_class_images: int = 10,
        batch_size: int = 32,
        anchor_weight: float = 1.0,
        distillation: float = 1.0,
        contrast: float = 1.0,
        temperature: float = 20.0,
        soft_share: float = 0.9,
        contrast_temperature: float = 0.07,
    ) -> None:
        super().__init__(task, local_epochs)
        at_least("method.client", 1, anchors=anchors, batch_size=batch_size)
        at_least(
            "method.client", 0, anchor_weight=anchor_weight, distillation=distillation, contrast=contrast
        )
        above("method.client", 0, temperature=temperature, contrast_temperature=contrast_temperature)
        within("method.client", 0, 1, soft_share=soft_share)
        self.condenser = AnchorCondenser(
            task, condensation, "noise", mean, std, min_synthetic=anchors, min_class_images=min_class_images
        )
        self.anchors_per_class, self.min_class_images, self.batch_size = anchors, min_class_images, batch_size
        self.anchor_weight, self.distillation, self.contrast = anchor_weight, distillation, contrast
        self.temperature, self.contrast_temperature = temperature, contrast_temperature
        self.soft_share = soft_share
        self.anchors, self.labels = torch.empty(0), torch.empty(0, dtype=torch.int64)
        self.logits = torch.empty(0, task.classes)
        """The other clients' mean logits of the anchors [A, K] in the last round; empty before round 2."""

    def receive(self, message: Message) -> None:
        """Loads weights, and the other clients' logits of the anchors."""
        self.logits = message[LOGITS]
        super().receive(message)

    def broadcast_spec(self) -> MessageSpec:
        """Declares weights and logits of any number of anchors."""
        return {**super().broadcast_spec(), LOGITS: TensorSpec((Free("anchors"), self.task.classes))}

    def training_step(self, batch: Mapping[str, Any], batch_idx: int = 0) -> dict[str, Tensor]:
        """Computes the losses of a batch of images and of a batch of anchors, in one forward pass."""
        if not len(self.anchors) or not (self.anchor_weight or self.distillation or self.contrast):
            return self.task.training_step(batch, batch_idx)
        rows = torch.randperm(len(self.anchors))[: self.batch_size]
        view = self.task.view(batch)
        images, labels = view["image"], view["label"]
        anchors = self.condenser.normalised(self.anchors[rows]).to(images)
        classes = self.labels[rows].to(labels)
        features = self.task({"image": torch.cat([images, anchors])})
        image_features, anchor_features = features[: len(images)], features[len(images) :]
        outputs = self.task.objective(image_features, view)
        logits = self.task.classifier(anchor_features).float()
        anchor_loss = F.cross_entropy(logits, classes)
        loss = outputs["loss"] + self.anchor_weight * anchor_loss
        # There are no logits of the anchors in round 1, for a client that missed the set-up, and without other clients.
        if len(self.logits) == len(self.anchors):
            teacher = self.logits[rows].to(logits)
            loss = loss + self.distillation * self._distillation_loss(logits, teacher, anchor_loss)
        if self.contrast:
            all_features = torch.cat([image_features, anchor_features.detach()]).float()
            all_labels = torch.cat([labels, classes])
            contrast = supervised_contrast(all_features, all_labels, self.contrast_temperature)
            loss = loss + self.contrast * contrast
        return {**outputs, "loss": loss, "anchor_loss": anchor_loss}

    def _distillation_loss(self, logits: Tensor, teacher: Tensor, anchor_loss: Tensor) -> Tensor:
        """Computes KD; the mean is over images and classes, as in the released code."""
        log_q, log_p = ((z / self.temperature).log_softmax(1) for z in (logits, teacher))
        kl = F.kl_div(log_q, log_p, log_target=True, reduction="batchmean") / self.task.classes
        return (1 - self.soft_share) * anchor_loss + self.soft_share * self.temperature**2 * kl


class DESAServer(FedAvgServer):
    """FedAvg's server, which also averages anchors over clients, and computes their logits under the clients' models.

    Args:
        client: A client, for the initial weights and the number of anchors.
    """

    merges_sums = False
    state_names = ("anchors", "labels", "logits")

    def __init__(self, client: DESAClient) -> None:
        super().__init__(client)
        self.task = deepcopy(client.task)
        self._normalised = client.condenser.normalised
        self.per_class, self.min_class_images = client.anchors_per_class, client.min_class_images
        self.anchors = torch.empty(0)
        self.labels = torch.empty(0, dtype=torch.int64)
        self.logits: dict[int, Tensor] = {}
        """Logits [A, K] of the anchors by the model of each client that took part in the last round."""

    def broadcast(self, client_id: int) -> Message:
        """Returns the weights, and the mean of the other clients' logits; no logits where there are no others."""
        others = [logits for client, logits in self.logits.items() if client != client_id]
        mean = torch.stack(others).mean(0) if others else torch.empty(0, self.task.classes)
        return {**super().broadcast(client_id), LOGITS: mean}

    def aggregate(self, updates: Mapping[int, Update]) -> None:
        """Averages the weights, and computes each model's logits of the anchors."""
        super().aggregate(updates)
        if not len(self.anchors):
            return
        images = self._normalised(self.anchors)
        self.task.to(self.device)
        self.logits = {
            client: torch.cat(apply_in_chunks(self.task, update.message, images, self._anchor_logits))
            for client, update in updates.items()
        }
        self.task.to("cpu")

    def _anchor_logits(self, images: Tensor) -> Tensor:
        logits: Tensor = self.task.classifier(self.task({"image": images}))
        return logits.float().cpu()


class SendAnchors(Exchange[DESAClient, DESAServer]):
    """The set-up exchange in which clients condense anchors, whose means over clients the server keeps."""

    name = "anchors"
    first_stage = True
    down = False
    trains = True

    def train(self, client: DESAClient, loader: DataLoader, fabric: Fabric) -> dict[str, float]:
        """Condenses the client's images."""
        client.condenser.context = client.context
        return client.condenser.condense(loader, fabric)

    discloses = DisclosedBy(lambda client: client.condenser.discloses)

    def send(self, client: DESAClient, loader: DataLoader) -> Message:
        """Returns the anchors."""
        return client.condenser.send(loader)

    def upload_spec(self, client: DESAClient) -> MessageSpec:
        """Declares the anchors."""
        return client.condenser.upload_spec()

    def validate(self, server: DESAServer, client_id: int, update: Update) -> None:
        """Checks the numbers of anchors and of classes."""
        images, counts = update.message[IMAGES], update.message[COUNTS]
        if (counts != server.per_class).any() or len(images) != int(counts.sum()):
            raise UserError(
                f"the client sent {len(images)} anchors of {len(counts)} classes, not {server.per_class} of each"
            )
        if len(counts) * server.min_class_images > update.num_samples:
            raise UserError(f"the client sent {len(counts)} classes, and has {update.num_samples} images")

    def aggregate(self, server: DESAServer, updates: Mapping[int, Update]) -> None:
        """Averages the anchors over the clients that own their class: the first of a class with the first, and so on.

        Raises:
            UserError: If no client owns a class, or image sizes differ between clients.
        """
        anchors = joined({client: update.message for client, update in updates.items()})
        classes = anchors.labels.unique()
        images_by_class = [anchors.images[anchors.labels == label] for label in classes]
        means = [images.float().unflatten(0, (-1, server.per_class)).mean(0) for images in images_by_class]
        server.anchors = torch.cat(means).round().to(torch.uint8)
        server.labels = classes.repeat_interleave(server.per_class)


class ReceiveAnchors(Exchange[DESAClient, DESAServer]):
    """The set-up exchange in which clients receive the mean anchors, and keep them."""

    name = "mean anchors"
    up = False

    def broadcast(self, server: DESAServer, client_id: int) -> Message:
        """Returns the anchors, the same to every client."""
        return {ANCHORS: server.anchors, LABELS: server.labels}

    def broadcast_spec(self, client: DESAClient) -> MessageSpec:
        """Declares any number of anchors, as bytes."""
        count = Free("anchors")
        shape = (count, Free("channels", 4), Free("height"), Free("width"))
        classes = client.task.classes
        return {
            ANCHORS: TensorSpec(shape, torch.uint8, unordered=True),
            LABELS: TensorSpec((count,), torch.int64, low=0, high=classes - 1, unordered=True),
        }

    def receive(self, client: DESAClient, message: Message) -> None:
        """Keeps the anchors."""
        client.anchors, client.labels = message[ANCHORS], message[LABELS]


def supervised_contrast(features: Tensor, labels: Tensor, temperature: float) -> Tensor:
    """Computes the supervised contrastive loss (Khosla et al., NeurIPS 2020) of features of one view of each image.

    ``-mean_i mean_{p of i's class} log(e^{z_i z_p / tau} / sum_{j != i} e^{z_i z_j / tau})`` with z of length 1; an
    image that is alone in its class adds 0.

    Args:
        features: Features [B, D], B at least 2.
        labels: Their classes [B].
        temperature: Temperature tau.
    """
    unit = F.normalize(features, dim=1)
    itself = torch.eye(len(unit), dtype=torch.bool, device=unit.device)
    with full_precision(unit):
        similar = (unit @ unit.T / temperature).masked_fill(itself, -torch.inf)
    likelihood = similar.log_softmax(1).masked_fill(itself, 0)
    positives = (labels[:, None] == labels) & ~itself
    mean_likelihood = (likelihood * positives).sum(1) / positives.sum(1).clamp(min=1)
    return -mean_likelihood.mean()


def exchanges(client: DESAClient) -> Exchanges:
    """Lists FedAvg's exchanges; before round 1 clients send anchors and receive their means over clients."""
    return with_exchanges(client, SendAnchors(), ReceiveAnchors())
