"""FedMix: clients train on images mixed with averages of others' images, to first order (Yoon et al., ICLR 2021).

Before round 1 each client sends averages: means of groups of its images, with the means of their one-hot labels. It
receives the averages of all clients. Everything else is FedAvg.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lit_fedad.contracts import Exchange, Exchanges, Free, Message, MessageSpec, TensorSpec, Update
from lit_fedad.contracts.disclosure import DisclosedBy, Disclosure, Disclosures, Kind
from lit_fedad.core.bounds import at_least, within
from lit_fedad.core.errors import UserError
from lit_fedad.methods.fedavg import FedAvgClient, FedAvgServer, with_exchanges
from lit_fedad.methods.parts.functional import gathered
from lit_fedad.models.encoders import refuse_frozen
from lit_fedad.tasks.classifier import Classifier

IMAGES, LABELS = "mean_images", "mean_labels"
_ROUNDING = 1e-3  # by which the entries of a mean label may miss a sum of 1


class FedMixClient(FedAvgClient):
    """A client whose loss is mixup with averages x_g, y_g of other images, expanded to first order.

    ``(1 - l) CE(f(x'), y) + l CE(f(x'), y_g) + l sum_i <d[(1 - l) CE(f(x'), y)] / dx'_i, x_g>`` with ``x' = (1 - l) x``
    and CE the mean over the batch. One average is drawn for each batch.

    Args:
        task: A `Classifier` of pixels.
        weight: Share l of the averages; 0 gives FedAvg.
        group: Fewest images in an average (M); None for one average of all the client's images. An average of few
            images reveals them.

    Raises:
        UserError: If the encoder is frozen, or a setting is out of range.
    """

    needs = Classifier
    state_names = ("mixed",)
    task: Classifier

    def __init__(
        self, task: Classifier, local_epochs: int = 1, weight: float = 0.05, group: int | None = None
    ) -> None:
        super().__init__(task, local_epochs)
        within("method.client", 0, 1, weight=weight)
        at_least("method.client", 1, group=group)
        refuse_frozen(task.encoder, "method fedmix averages images")
        self.weight, self.group = weight, group
        self.mixed: Message = {}

    def averages_spec(self) -> MessageSpec:
        """Declares any number of averages."""
        groups = Free("mean images")
        return {
            IMAGES: TensorSpec((groups, Free("channels", 4), Free("height"), Free("width")), unordered=True),
            LABELS: TensorSpec((groups, self.task.classes), low=0, high=1 + _ROUNDING, unordered=True),
        }

    def on_train_start(self) -> None:
        """Moves the averages to the client's device."""
        self.mixed = {name: entry.to(self.device) for name, entry in self.mixed.items()}

    def on_train_end(self) -> None:
        """Moves the averages back to the CPU."""
        self.mixed = {name: entry.cpu() for name, entry in self.mixed.items()}

    def training_step(self, batch: Mapping[str, Any], batch_idx: int = 0) -> dict[str, Tensor]:
        """Computes the mixed loss, and the task's accuracy."""
        if not self.weight or not self.mixed:
            return self.task.training_step(batch, batch_idx)
        row = int(torch.randint(len(self.mixed[IMAGES]), ()))
        mean_image, mean_label = self.mixed[IMAGES][row], self.mixed[LABELS][row]
        view, share = self.task.view(batch), self.weight
        images = ((1 - share) * view["image"]).requires_grad_()
        logits = self.task.classifier(self.task({**view, "image": images})).float()
        own_loss = (1 - share) * F.cross_entropy(logits, view["label"])
        mixed_loss = share * F.cross_entropy(logits, mean_label.expand(len(logits), -1))
        (gradient,) = torch.autograd.grad(own_loss, images, create_graph=True)
        loss = own_loss + mixed_loss + share * (gradient * mean_image).sum()
        accuracy = (logits.detach().argmax(1) == view["label"]).float().mean()
        return {"loss": loss, "accuracy": accuracy}


class FedMixServer(FedAvgServer):
    """FedAvg's server, which also passes on the averages."""

    state_names = ("mixed",)

    def __init__(self, client: FedMixClient) -> None:
        super().__init__(client)
        self.mixed: Message = {}
        self.group = client.group


def _disclosed(client: FedMixClient) -> Disclosures:
    """Returns what averages disclose; a mean of one image is that image."""
    if client.group == 1:
        return (Disclosure(Kind.IMAGES, "all training images, as they are, with their labels"),)
    many = f"one for every {client.group} training images" if client.group else "one of all training images"
    what = f"mean images, {many}, with their mean labels, which all sites receive as they are"
    return (Disclosure(Kind.MEAN_IMAGES, what, client.group),)


class SendAverages(Exchange[FedMixClient, FedMixServer]):
    """The set-up exchange in which clients send averages of their images, which the server joins."""

    name = "averages"
    first_stage = True
    down = False

    discloses = DisclosedBy(_disclosed)

    def send(self, client: FedMixClient, loader: DataLoader) -> Message:
        """Computes ``mean_images`` [g, C, H, W] and ``mean_labels`` [g, K] of g groups, drawn at random.

        Groups have at least ``group`` images, or all of the client's.
        """
        images, labels = gathered(loader, "image", "label")
        order = torch.randperm(len(images), generator=client.context.generator("groups"))
        groups = order.tensor_split(max(1, len(images) // client.group) if client.group else 1)
        one_hot = F.one_hot(labels, client.task.classes).float()
        return {
            IMAGES: torch.stack([images[group].mean(0) for group in groups]),
            LABELS: torch.stack([one_hot[group].mean(0) for group in groups]),
        }

    def upload_spec(self, client: FedMixClient) -> MessageSpec:
        """Declares the averages."""
        return client.averages_spec()

    def validate(self, server: FedMixServer, client_id: int, update: Update) -> None:
        """Checks the number of groups, and that each mean label sums to 1."""
        labels = update.message[LABELS]
        max_groups = max(1, update.num_samples // server.group) if server.group else 1
        if not 1 <= len(labels) <= max_groups:
            raise UserError(
                f"the client sent {len(labels)} averages, and its images make at most {max_groups}"
            )
        if float((labels.sum(1) - 1).abs().max()) > _ROUNDING:
            raise UserError("the client's mean labels do not sum to 1")

    def aggregate(self, server: FedMixServer, updates: Mapping[int, Update]) -> None:
        """Joins the averages, in client order.

        Raises:
            UserError: If image sizes differ between clients.
        """
        messages = [update.message for update in updates.values()]
        if len({tuple(message[IMAGES].shape[1:]) for message in messages}) > 1:
            raise UserError("clients sent averages of images of several sizes; bring them to one size")
        server.mixed = {name: torch.cat([message[name] for message in messages]) for name in (IMAGES, LABELS)}


class ReceiveAverages(Exchange[FedMixClient, FedMixServer]):
    """The set-up exchange in which clients receive the averages of all clients, and keep them."""

    name = "all averages"
    up = False

    def broadcast(self, server: FedMixServer, client_id: int) -> Message:
        """Returns the averages, the same to every client."""
        return server.mixed

    def broadcast_spec(self, client: FedMixClient) -> MessageSpec:
        """Declares the averages."""
        return client.averages_spec()

    def receive(self, client: FedMixClient, message: Message) -> None:
        """Keeps the averages."""
        client.mixed = dict(message)


def exchanges(client: FedMixClient) -> Exchanges:
    """Lists FedAvg's exchanges; before round 1 clients send averages, and receive those of all clients."""
    return with_exchanges(client, SendAverages(), ReceiveAverages())
