"""Deep SVDD: normal images are mapped close to one centre (Ruff et al., ICML 2018)."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lit_fedad.contracts import Context, Prediction, Task
from lit_fedad.contracts.compute import map_batches
from lit_fedad.core.bounds import above, at_least, within
from lit_fedad.models.convnets import contrast_normalised
from lit_fedad.models.encoders import FrozenEncoder

_CONTRAST = 4.0  # mean absolute deviations from the mean of an image that are mapped to 0 and 1


class Bottleneck(Task):
    """A task whose features are a bottleneck z that images can be reconstructed from.

    On pixels, images are scaled to [0, 1], encoded and decoded. On frozen features a hidden layer leads to the
    bottleneck, and another one back. The features stay frozen, without the encoder's own network: such a network could
    make all features alike, so that there is nothing to reconstruct and nothing to tell apart.

    Args:
        encoder: Maps images [B, 3, S, S] to features [B, C], with C as its attribute ``num_features``: a network that
            is trained on pixels, or a `FrozenEncoder`, whose own network is left out.
        decoder: Builds the decoder to images in [0, 1], given the width of the bottleneck and S; unused if the encoder
            is frozen.
        image_size: Side S of the images in pixels.
        mean: Channel means by which images were normalised.
        std: Channel standard deviations by which images were normalised.
        width: Width D of the bottleneck.
        hidden: Width of the hidden layers between frozen features and bottleneck, and back.
        pixels: Scale of the images: ``plain`` pixels in [0, 1], or global ``contrast`` normalisation of each image,
            where [0, 1] spans four mean absolute deviations to either side of the image's mean.
        learning_rate: Learning rate of Adam.
        weight_decay: Weight decay of Adam.

    Attributes:
        biases: Whether layers on the way to the bottleneck have biases.

    Raises:
        UserError: If a number is out of range.
    """

    output_modules: tuple[str, ...] = ("decoder",)
    biases = True
    mean: Tensor
    std: Tensor

    def __init__(
        self,
        encoder: nn.Module,
        decoder: Callable[[int, int], nn.Module],
        image_size: int,
        mean: Sequence[float],
        std: Sequence[float],
        width: int = 128,
        hidden: int = 256,
        pixels: Literal["plain", "contrast"] = "plain",
        learning_rate: float = 1e-3,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__()
        at_least("task", 1, width=width, hidden=hidden)
        at_least("task", 0, learning_rate=learning_rate, weight_decay=weight_decay)
        self.encoder, self.num_features, self.pixels = encoder, width, pixels
        channels: int = encoder.num_features  # type: ignore[assignment]
        self.frozen = isinstance(encoder, FrozenEncoder)
        if isinstance(encoder, FrozenEncoder):
            encoder.network = None
            encode, decode = nn.Linear(channels, hidden, bias=self.biases), nn.Linear(width, hidden)
            self.compress: nn.Module = nn.Sequential(
                encode, nn.LeakyReLU(), nn.Linear(hidden, width, bias=self.biases)
            )
            self.decoder: nn.Module = nn.Sequential(decode, nn.LeakyReLU(), nn.Linear(hidden, channels))
        else:
            self.compress = nn.Linear(channels, width, bias=self.biases)
            self.decoder = decoder(width, image_size)
        self.learning_rate, self.weight_decay = learning_rate, weight_decay
        self.register_buffer("mean", torch.tensor(mean).view(-1, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(std).view(-1, 1, 1), persistent=False)

    def forward(self, batch: Mapping[str, Any]) -> Tensor:
        """Computes the bottleneck z [B, D]."""
        inputs = self.inputs(batch)
        return self.compress(inputs if self.frozen else self.encoder(inputs))

    def errors(self, features: Tensor, batch: Mapping[str, Any]) -> Tensor:
        """Computes the mean squared error of each image's reconstruction [B]."""
        return (self.decoder(features) - self.inputs(batch)).square().flatten(1).mean(1)

    def inputs(self, batch: Mapping[str, Any]) -> Tensor:
        """Computes the inputs that are reconstructed: images in [0, 1] [B, 3, S, S], or frozen features [B, C]."""
        if self.frozen:
            return self.encoder(batch["image"])
        images = batch["image"] * self.std + self.mean
        return images if self.pixels == "plain" else 0.5 + contrast_normalised(images) / (2 * _CONTRAST)


def off_zero(mean: Tensor, margin: float) -> Tensor:
    """Moves the coordinates of a mean [D] whose magnitude is below the margin to plus or minus the margin.

    A network without biases could reach a centre at 0 by weights of 0.
    """
    return torch.where(mean.abs() < margin, torch.where(mean < 0, -margin, margin), mean)


class DeepSVDD(Bottleneck):
    """A hypersphere around normal images: the score is the squared distance d of z to the centre c.

    ``one-class`` minimises the mean of d. ``soft-boundary`` minimises ``R^2 + mean max(0, d - R^2) / nu``. After the
    first ``radius_rounds`` rounds, the square R^2 of the radius is the (1 - nu) quantile of d in each batch; scores are
    d - R^2.

    The centre is a buffer, which the method of the same name pools over clients. With other methods the centre of each
    client is the mean of its own images under the initial weights.

    Args:
        encoder: See `Bottleneck`.
        objective: ``one-class`` or ``soft-boundary``.
        nu: Share of training images that may lie outside the sphere.
        radius_rounds: Rounds before the radius is first set.
        margin: Smallest magnitude of each coordinate of the centre (`off_zero`).
        decay_after: Share of the rounds after which the learning rate falls to a tenth.
        rounds: Number of all rounds.
        **bottleneck: See `Bottleneck`.

    Raises:
        UserError: If a number is out of range.
    """

    output_modules: tuple[str, ...] = ()  # the decoder serves pre-training only
    biases = False
    prepares = True
    local_buffers = ("centre",)
    scoring_buffers = local_buffers
    centre: Tensor
    radius: Tensor

    def __init__(
        self,
        encoder: nn.Module,
        rounds: int,
        objective: Literal["one-class", "soft-boundary"] = "one-class",
        nu: float = 0.1,
        radius_rounds: int = 10,
        margin: float = 0.1,
        decay_after: float = 1 / 3,
        **bottleneck: Any,
    ) -> None:
        super().__init__(encoder, **bottleneck)
        above("task", 0, nu=nu)
        within("task", 0, 1, nu=nu, decay_after=decay_after)
        at_least("task", 0, rounds=rounds, radius_rounds=radius_rounds, margin=margin)
        self.soft, self.nu, self.radius_rounds = objective == "soft-boundary", nu, radius_rounds
        self.margin, self.decay_after, self.rounds = margin, decay_after, rounds
        self.pretrains = False
        self.register_buffer("centre", torch.zeros(self.num_features))
        self.register_buffer("radius", torch.zeros(()))

    @contextmanager
    def reconstructing(self) -> Iterator[None]:
        """Replaces the loss by that of an autoencoder within a block, for pre-training."""
        self.pretrains = True
        try:
            yield
        finally:
            self.pretrains = False

    @property
    def images_behind(self) -> int | None:
        """One if there is a radius, which is shared: it is the distance of one image, or lies between those of two."""
        return 1 if self.soft else None

    def distances(self, features: Tensor) -> Tensor:
        """Computes squared distances of z to the centre [B]."""
        return (features - self.centre).square().sum(1)

    def objective(self, features: Tensor, batch: Mapping[str, Any]) -> dict[str, Tensor]:
        """Computes the loss; in pre-training the mean squared error of reconstructions."""
        if self.pretrains:
            return {"loss": self.errors(features, batch).mean()}
        distances = self.distances(features)
        if not self.soft:
            return {"loss": distances.mean()}
        squared = self.radius.square()
        loss = squared + (distances - squared).relu().mean() / self.nu
        if self.round > self.radius_rounds:
            self.radius = torch.quantile(distances.detach().float(), 1 - self.nu).sqrt()
        return {"loss": loss}

    def predict(self, features: Tensor, batch: Mapping[str, Any]) -> Prediction:
        """Scores images by their squared distance to the centre, minus the squared radius if there is one."""
        distances = self.distances(features)
        return Prediction(image_score=distances - self.radius.square() if self.soft else distances)

    def refresh(self, loader: DataLoader, context: Context, first: bool = False) -> None:
        """Sets the centre to the mean of local images, the first time; it stays there when weights change."""
        if first:
            self.centre = off_zero(self.feature_mean(loader), self.margin).to(self.centre)

    @torch.no_grad()
    def feature_mean(self, loader: DataLoader) -> Tensor:
        """Computes the mean of local images' z [D]."""
        total, images = torch.zeros(self.num_features, dtype=torch.float64), 0
        for features in map_batches(self, loader, self):
            total += features.double().sum(0).cpu()
            images += len(features)
        return (total / max(images, 1)).float()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Builds Adam, with a tenth of the learning rate in the last rounds."""
        optimizer = super().configure_optimizers()
        if not self.pretrains and self.round > self.decay_after * self.rounds:
            optimizer.param_groups[0]["lr"] /= 10
        return optimizer
