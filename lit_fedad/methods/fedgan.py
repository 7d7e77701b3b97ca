"""FedGAN: clients average a generator of images with the model, and train on what it generates (Nguyen et al., 2021).

Nguyen, Ding, Pathirana, Seneviratne and Zomaya, IEEE Internet of Things Journal 2021, arXiv 2110.07136: the GANs of all
clients exchange their weights with a server, which averages them. Its differential privacy and its blockchain are left
out. FedVCK compares with it as a method that sends model, generator and discriminator in both directions (FedVCK
Table 10), and does not say how generated images enter training. Here clients train on them from round 2, with equally
many of every class.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lit_fedad.contracts import Exchanges, Message, MessageSpec, spec_of
from lit_fedad.contracts.compute import set_up
from lit_fedad.contracts.disclosure import TRAINED_WEIGHTS, Disclosure, Kind
from lit_fedad.contracts.state import detached
from lit_fedad.core.bounds import above, within
from lit_fedad.core.errors import UserError
from lit_fedad.federation.client_runner import Train
from lit_fedad.methods.fedavg import MEANS, FedAvgClient, with_exchanges
from lit_fedad.models.conditional_gan import ConditionalDiscriminator, ConditionalGenerator
from lit_fedad.models.encoders import refuse_frozen
from lit_fedad.tasks.classifier import Classifier

_ADAM_BETAS = (0.5, 0.999)  # as in DCGAN

GAN = "GAN/"
"""Prefix of the weights of both GAN networks; robust rules measure these apart from the model's, which change less."""


class FedGANClient(FedAvgClient):
    """A client that trains its model on local and generated images, then generator and discriminator on local ones.

    The model trains on images of the generator that the client received. The GAN is conditional, because generated
    images need labels; the paper does not say whether its GAN is. The server is FedAvg's: it averages all networks.

    Args:
        task: A `Classifier` of pixels.
        image_size: S, the side of the images in pixels.
        channels: Channels of the images.
        mean: Mean of each channel in [0, 1], for the normalisation of images.
        std: Standard deviation of each channel.
        local_epochs: Passes over the client's data per round (E), of the model and then of the GAN.
        share: Ratio of generated to local images in a batch, from round 2; with 0 the model is trained as in FedAvg.
        latent: Length of a noise vector.
        width: Channels of both networks' 4 x 4 maps.
        learning_rate: Learning rate of both networks' Adam.

    Raises:
        UserError: If the encoder is frozen, or a setting is out of range.
    """

    needs = Classifier
    task: Classifier
    discloses = (
        TRAINED_WEIGHTS,
        Disclosure(
            Kind.SYNTHETIC_IMAGES,
            "weights of a generator that was trained to draw images like those of each of the client's classes",
            by_product=True,
        ),
    )

    def __init__(
        self,
        task: Classifier,
        image_size: int,
        channels: int = 3,
        mean: Sequence[float] = (0.5, 0.5, 0.5),
        std: Sequence[float] = (0.5, 0.5, 0.5),
        local_epochs: int = 1,
        share: float = 1.0,
        latent: int = 100,
        width: int = 512,
        learning_rate: float = 2e-4,
    ) -> None:
        super().__init__(task, local_epochs)
        within("method.client", 0, 1000, share=share)
        above("method.client", 0, learning_rate=learning_rate)
        refuse_frozen(task.encoder, "method fedgan generates images")
        self.share, self.learning_rate = share, learning_rate
        self.generator = ConditionalGenerator(task.classes, image_size, channels, latent, width, mean, std)
        self.discriminator = ConditionalDiscriminator(task.classes, image_size, channels, width)

    def shared_state(self) -> Message:
        """Returns copies of the weights of model, generator and discriminator."""
        return {**super().shared_state(), **detached(self._gan.state_dict())}

    def shared_spec(self) -> MessageSpec:
        """Declares the weights of model, generator and discriminator."""
        return {**super().shared_spec(), **spec_of(self._gan.state_dict())}

    def receive(self, message: Message) -> None:
        """Loads all three networks."""
        self._gan.load_state_dict(message, strict=False)
        super().receive(message)

    def training_step(self, batch: Mapping[str, Any], batch_idx: int = 0) -> dict[str, Tensor]:
        """Computes the task's loss on local and generated images together, which are augmented alike."""
        count = round(self.share * len(batch["label"])) if self.context.round > 1 else 0
        if not count:
            return self.task.training_step(batch, batch_idx)
        labels = balanced_labels(count, self.task.classes).to(batch["label"])
        both = {
            "image": torch.cat([batch["image"], self.generate(labels).to(batch["image"])]),
            "label": torch.cat([batch["label"], labels]),
        }
        return self.task.training_step(both, batch_idx)

    @torch.no_grad()
    def generate(self, labels: Tensor) -> Tensor:
        """Generates normalised images [B, C, S, S] of labels [B]; noise comes from torch's global CPU generator."""
        return self.generator(labels, self._noise(labels))

    def train_gan(self, loader: DataLoader, fabric: Fabric) -> dict[str, float]:
        """Trains discriminator and generator in turn, by one step of Adam each for every batch.

        The discriminator minimises ``-log D(x, y) - log(1 - D(G(z, y), y))``, the generator ``-log D(G(z, y), y)``,
        with the labels y of the batch.

        Args:
            loader: The client's batches.
            fabric: Device and precision.

        Returns:
            Mean losses of both, over all batches.

        Raises:
            UserError: If training diverges.
        """
        networks: list[nn.Module] = [self.discriminator, self.generator]
        optimizers = [self._optimizer(network.to(fabric.device), fabric) for network in networks]
        totals, steps = [0.0, 0.0], 0
        for _ in range(self.local_epochs):
            for batch in loader:
                real, labels = (fabric.to_device(batch[name]) for name in ("image", "label"))
                with fabric.autocast():
                    fake = self.generator(labels, self._noise(labels))
                    logits = self.discriminator(real, labels), self.discriminator(fake.detach(), labels)
                loss = F.softplus(-logits[0].float()).mean() + F.softplus(logits[1].float()).mean()
                totals[0] += self._step(optimizers[0], loss, fabric)
                with fabric.autocast():
                    fake_logits = self.discriminator(fake, labels)
                totals[1] += self._step(optimizers[1], F.softplus(-fake_logits.float()).mean(), fabric)
                steps += 1
        return {"discriminator_loss": totals[0] / steps, "generator_loss": totals[1] / steps}

    def _optimizer(self, network: nn.Module, fabric: Fabric) -> torch.optim.Optimizer:
        return set_up(
            torch.optim.Adam(network.parameters(), lr=self.learning_rate, betas=_ADAM_BETAS), fabric
        )

    def _step(self, optimizer: torch.optim.Optimizer, loss: Tensor, fabric: Fabric) -> float:
        if not torch.isfinite(loss):
            raise UserError("the GAN diverged; lower method.client.learning_rate")
        # Both networks' gradients are reset, because the generator's loss leaves gradients in the discriminator too.
        self.discriminator.zero_grad()
        self.generator.zero_grad()
        fabric.backward(loss)
        optimizer.step()
        return float(loss.detach())

    def _noise(self, labels: Tensor) -> Tensor:
        return torch.randn(len(labels), self.generator.latent).to(labels.device)

    @property
    def _gan(self) -> nn.ModuleDict:
        """Generator and discriminator, under the names that their weights have in messages."""
        return nn.ModuleDict({f"{GAN}generator": self.generator, f"{GAN}discriminator": self.discriminator})


def balanced_labels(count: int, classes: int) -> Tensor:
    """Returns labels [count] of all classes equally often; torch's global generator draws which class is first.

    Example:
        >>> balanced_labels(7, 3).bincount().sort().values.tolist()
        [2, 2, 3]
    """
    return (torch.arange(count) + torch.randint(classes, ())) % classes


class TrainAll(Train):
    """The exchange of a round, in which clients train their model, then generator and discriminator."""

    def train(self, client: FedGANClient, loader: DataLoader, fabric: Fabric) -> dict[str, float]:  # type: ignore[override]
        """Trains the model by `fit`, before the GAN so that it sees the same batches as FedAvg's model."""
        return {**super().train(client, loader, fabric), **client.train_gan(loader, fabric)}


def exchanges(client: FedGANClient) -> Exchanges:
    """Lists FedAvg's exchanges, with the training of all three networks."""
    return with_exchanges(client, rounds=(TrainAll(MEANS),))
