"""An encoder that is trained on pixels."""

from __future__ import annotations

from timm.layers import freeze_batch_norm_2d
from torch import Tensor, nn
from torch.nn import functional as F

from lit_fedad.guards.bounds import above


def trained_encoder(
    network: nn.Module, freeze_normalisation: bool = False, length: float | None = None
) -> nn.Module:
    """Returns the network that a task trains on pixels.

    Args:
        network: The network.
        freeze_normalisation: Whether its batch normalisation keeps the statistics and the affine weights that it begins
            with, or that ``start`` loads: they follow neither a client's images nor a server's public ones.
        length: Length that features are scaled to; None where they stay as the network gives them.

    Raises:
        UserError: If the length is not positive.
    """
    above("features", 0, length=length)
    network = freeze_batch_norm_2d(network) if freeze_normalisation else network
    return network if length is None else FixedLength(network, length)


class FixedLength(nn.Module):
    """A network whose features are scaled to one length.

    Args:
        network: The network.
        length: The length.
    """

    def __init__(self, network: nn.Module, length: float) -> None:
        super().__init__()
        self.network, self.length = network, length
        self.num_features = network.num_features

    def forward(self, images: Tensor) -> Tensor:
        """Computes features [B, C] of the length."""
        return self.length * F.normalize(self.network(images), dim=1)
