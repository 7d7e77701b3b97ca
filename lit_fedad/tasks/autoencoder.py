"""Anomaly detection by the reconstruction error of an autoencoder of normal images."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lit_fedad.contracts import Prediction, Task
from lit_fedad.core.bounds import at_least
from lit_fedad.core.errors import UserError
from lit_fedad.models.backbones import FeaturePyramid
from lit_fedad.models.encoders import FrozenEncoder
from lit_fedad.tasks.patches import AnomalyMap, PatchTask, sample_patches


class FeatureAutoencoder(PatchTask):
    """An autoencoder of standardised frozen features, whose squared error is the score.

    On a grid it reconstructs the features of every patch, and draws the errors as a map. On a grid of one patch
    (``grid=1``) it reconstructs the pooled features of whole images, as `FrozenEncoder` computes them, and draws no
    map.

    Args:
        backbone: Frozen feature extractor.
        grid: See `PatchTask`.
        rim: See `PatchTask`; a grid of one patch has none.
        size: Side to which whole images are scaled with ``grid=1``, in pixels; on finer grids images are not scaled.
        mean: Channel means by which images were normalised.
        std: Channel standard deviations by which images were normalised.
        hidden: Width of the hidden layers of encoder and decoder.
        bottleneck: Width of the bottleneck, from which features are reconstructed.
        patches_per_image: Number of random patches of each image in a training step.
        learning_rate: Learning rate of Adam.
        **patches: See `PatchTask`.

    Raises:
        UserError: If a number is out of range, or images are cut into tiles on a grid of one patch.
    """

    output_modules = ("decoder",)

    def __init__(
        self,
        backbone: FeaturePyramid,
        grid: int = 56,
        rim: int = 0,
        size: int = 64,
        mean: Sequence[float] = (0.5, 0.5, 0.5),
        std: Sequence[float] = (0.5, 0.5, 0.5),
        hidden: int = 256,
        bottleneck: int = 32,
        patches_per_image: int = 64,
        learning_rate: float = 1e-3,
        **patches: Any,
    ) -> None:
        super().__init__(backbone, grid, rim=rim if grid > 1 else 0, **patches)
        if grid == 1 and (tile := patches.get("tile")) is not None:
            raise UserError(
                f"image.tile={tile}: on a grid of one patch whole images are scaled to features.size; leave"
                " image.tile out, or give a larger grid"
            )
        at_least("task", 1, hidden=hidden, bottleneck=bottleneck, patches_per_image=patches_per_image)
        at_least("task", 0, learning_rate=learning_rate)
        self.encoder = FrozenEncoder(backbone, size, hidden=0, mean=mean, std=std) if grid == 1 else None
        self.patches_per_image, self.learning_rate = patches_per_image, learning_rate
        self.num_features = bottleneck
        self.compress = nn.Sequential(
            nn.Linear(self.channels, hidden), nn.ReLU(), nn.Linear(hidden, bottleneck)
        )
        self.decoder = nn.Sequential(
            nn.Linear(bottleneck, hidden), nn.ReLU(), nn.Linear(hidden, self.channels)
        )

    def embed(self, batch: Mapping[str, Any], average_pool: bool | str | None = None) -> Tensor:
        """Computes frozen features of patches [B, H0 * W0, C], or of whole images [B, 1, C]."""
        if self.encoder is None:
            return super().embed(batch, average_pool)
        return self.encoder(batch["image"])[:, None]

    @torch.no_grad()
    def view(self, batch: Mapping[str, Any]) -> dict[str, Tensor]:
        """Draws standardised features of random patches: ``patches`` [B, n, C]."""
        (patches,) = sample_patches(self.patches_per_image, self.standardised(self.embed(batch)))
        return {"patches": patches}

    def forward(self, batch: Mapping[str, Any]) -> Tensor:
        """Computes the bottleneck [B, n, bottleneck] of a view's patches, or of all patches of whole images."""
        return self.compress(self._patches(batch))

    def errors(self, features: Tensor, batch: Mapping[str, Any]) -> Tensor:
        """Computes the squared error of each patch, averaged over the channels [B, n]."""
        return (self.decoder(features) - self._patches(batch)).square().mean(2)

    def objective(self, features: Tensor, batch: Mapping[str, Any]) -> dict[str, Tensor]:
        """Computes the mean squared error of a view as ``loss``."""
        return {"loss": self.errors(features, batch).mean()}

    def predict(self, features: Tensor, batch: Mapping[str, Any]) -> Prediction:
        """Computes a smoothed map of the patches' errors and its peak, or the error of whole images."""
        errors = self.errors(features, batch).flatten()
        if self.encoder is not None:
            return Prediction(image_score=errors)
        return Prediction(image_score=self.judge(errors), anomaly_map=self.draw(errors))

    def _patches(self, batch: Mapping[str, Any]) -> Tensor:
        """Returns the patches of a view, or the standardised features of whole images [B, n, C]."""
        return batch["patches"] if "patches" in batch else self.standardised(self.embed(batch))


class Autoencoder(Task):
    """An autoencoder that scores an image by its mean squared reconstruction error.

    The baseline "AE" of FADngs Table I. Images are normalised and reconstructions lie in [0, 1]: errors are computed in
    [0, 1], where all channels have equal weight.

    Args:
        encoder: Maps images [B, 3, S, S] to latent vectors [B, C], with C as its attribute ``num_features``.
        decoder: Builds the decoder to images in [0, 1], given C and S.
        image_size: Side S of the images in pixels.
        mean: Channel means by which images were normalised.
        std: Channel standard deviations by which images were normalised.
        learning_rate: Learning rate of Adam.
        sigma: Standard deviation of the Gaussian smoothing of the anomaly map, in pixels.
    """

    output_modules = ("decoder",)
    mean: Tensor
    std: Tensor

    def __init__(
        self,
        encoder: nn.Module,
        decoder: Callable[[int, int], nn.Module],
        image_size: int,
        mean: Sequence[float],
        std: Sequence[float],
        learning_rate: float = 1e-3,
        sigma: float = 4.0,
    ) -> None:
        super().__init__()
        at_least("task", 0, learning_rate=learning_rate)
        self.encoder = encoder
        self.num_features: int = encoder.num_features  # type: ignore[assignment]
        self.decoder = decoder(self.num_features, image_size)
        self.learning_rate = learning_rate
        self.draw_map = AnomalyMap(image_size, image_size, sigma)
        self.register_buffer("mean", torch.tensor(mean).view(-1, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(std).view(-1, 1, 1), persistent=False)

    def forward(self, batch: Mapping[str, Any]) -> Tensor:
        """Computes latent vectors [B, C]."""
        return self.encoder(self.images_of(batch))

    def errors(self, features: Tensor, batch: Mapping[str, Any]) -> Tensor:
        """Computes squared errors, averaged over the channels [B, S, S]."""
        images = batch["image"] * self.std + self.mean
        return (self.decoder(features) - images).square().mean(1)

    def objective(self, features: Tensor, batch: Mapping[str, Any]) -> dict[str, Tensor]:
        """Computes the mean squared error as ``loss``."""
        return {"loss": self.errors(features, batch).mean()}

    def predict(self, features: Tensor, batch: Mapping[str, Any]) -> Prediction:
        """Computes each image's mean squared error, and a smoothed map of the errors."""
        errors = self.errors(features, batch)
        return Prediction(image_score=errors.flatten(1).mean(1), anomaly_map=self.draw_map(errors))
