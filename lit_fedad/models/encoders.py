"""Encoders that tasks train: a network on pixels, or a residual network on the features of a frozen backbone."""

from collections.abc import Sequence

import torch
from timm.layers import freeze_batch_norm_2d
from torch import Tensor, nn
from torch.nn import functional as F

from lit_fedad.contracts.compute import full_precision
from lit_fedad.core.bounds import above, at_least
from lit_fedad.core.errors import UserError
from lit_fedad.models.backbones import FeaturePyramid
from lit_fedad.models.contrastive_views import kept_turns


class FrozenEncoder(nn.Module):
    """Frozen features of an image, and a trainable residual network on them.

    The features are the means of the maps of all layers of the backbone, concatenated and scaled to the same length,
    the root of their number C. So each has a mean square of 1, like features that a network learns. At length 1 biases
    would outweigh them, the gradient of a linear head would be C times smaller, and the softmax of their coordinates
    would be uniform. The network adds its output to the features. Before training this output is zero, so that the
    encoder begins as the frozen features. A task may turn ``unit_length`` off (PANDA): then neither the features nor
    their sum with the output are scaled.

    Args:
        backbone: The frozen backbone.
        size: Side to which images are scaled for it, in pixels.
        hidden: Hidden units of the trained network; 0 for no network.
        views: Random views of an image whose features are computed once, for losses that need views; see `kept_turns`.
        mean: Channel means by which images were normalised.
        std: Channel standard deviations by which images were normalised.

    Attributes:
        num_features: Channels C of all layers together.
        length: Length of the encoder's features, the root of C.
        unit_length: Whether features are scaled.
        turns: Rotation of every cached view, in quarter turns.

    Raises:
        UserError: If a size is out of range.
    """

    pixel_mean: Tensor
    pixel_std: Tensor

    def __init__(
        self,
        backbone: FeaturePyramid,
        size: int = 64,
        hidden: int = 256,
        views: int = 10,
        mean: Sequence[float] = (0.5, 0.5, 0.5),
        std: Sequence[float] = (0.5, 0.5, 0.5),
    ) -> None:
        super().__init__()
        at_least("features", 8, size=size)
        at_least("features", 0, hidden=hidden)
        self.backbone, self.size, self.turns = backbone, size, kept_turns(views)
        self.num_features = sum(backbone.channels)
        self.length = self.num_features**0.5
        self.unit_length = True
        self.network = None
        if hidden:
            last = nn.Linear(hidden, self.num_features)
            nn.init.zeros_(last.weight)
            nn.init.zeros_(last.bias)
            self.network = nn.Sequential(nn.Linear(self.num_features, hidden), nn.ReLU(), last)
        # The backbone expects (x std + mean - its mean) / its std, with x the normalised pixels of the data set.
        expected = torch.tensor(backbone.mean).view(-1, 1, 1), torch.tensor(backbone.std).view(-1, 1, 1)
        given = torch.tensor(mean).view(-1, 1, 1), torch.tensor(std).view(-1, 1, 1)
        self.register_buffer("pixel_mean", (expected[0] - given[0]) / given[1], persistent=False)
        self.register_buffer("pixel_std", expected[1] / given[1], persistent=False)

    @torch.no_grad()
    def features(self, images: Tensor) -> Tensor:
        """Computes frozen features [B, C] of normalised images [B, 3, S, S] or grey ones [B, 1, S, S]."""
        pixels = (images - self.pixel_mean) / self.pixel_std  # grey images get three channels
        square = (self.size, self.size)
        if pixels.shape[2:] != square:
            pixels = F.interpolate(pixels, size=square, mode="bilinear", align_corners=False, antialias=True)
        with full_precision(pixels):  # cached features are computed in full precision too
            maps = self.backbone(pixels)
        pooled = torch.cat([features.float().mean((2, 3)) for features in maps], dim=1)
        return F.normalize(pooled, dim=1) if self.unit_length else pooled

    def forward(self, images: Tensor) -> Tensor:
        """Computes features [B, C] of images [B, 3, S, S], or of their `features` [B, C]."""
        features = self.features(images) if images.ndim == 4 else images
        if not self.unit_length:
            return features if self.network is None else features + self.network(features)
        frozen = self.length * features
        if self.network is None:
            return frozen
        return self.length * F.normalize(frozen + self.network(frozen), dim=1)


def refuse_frozen(encoder: nn.Module, why: str) -> None:
    """Refuses a frozen encoder, through which a method cannot compute gradients for pixels.

    Args:
        encoder: The encoder.
        why: What needs pixels, for the error message.

    Raises:
        UserError: If the encoder is a `FrozenEncoder`.
    """
    if isinstance(encoder, FrozenEncoder):
        raise UserError(f"{why}: give features=train")


def trained_encoder(
    network: nn.Module, freeze_normalisation: bool = False, length: float | None = None
) -> nn.Module:
    """Returns the network that a task trains on pixels.

    Args:
        network: The network.
        freeze_normalisation: Whether its batch normalisation keeps its initial statistics and affine weights, or those
            that ``start`` loads; neither a client's images nor a server's public images change them then.
        length: Length to which features are scaled; None for no scaling.

    Raises:
        UserError: If the length is not positive.
    """
    above("features", 0, length=length)
    network = freeze_batch_norm_2d(network) if freeze_normalisation else network
    return network if length is None else FixedLength(network, length)


class FixedLength(nn.Module):
    """A network whose features are scaled to a fixed length."""

    def __init__(self, network: nn.Module, length: float) -> None:
        super().__init__()
        self.network, self.length = network, length
        self.num_features = network.num_features

    def forward(self, images: Tensor) -> Tensor:
        """Computes features [B, C], scaled to the length."""
        return self.length * F.normalize(self.network(images), dim=1)
