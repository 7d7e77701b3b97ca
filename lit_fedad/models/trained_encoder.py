"""An encoder that is trained on pixels."""

from timm.layers import freeze_batch_norm_2d
from torch import nn


def trained_encoder(network: nn.Module, freeze_normalisation: bool = False) -> nn.Module:
    """Returns the network that a task trains on pixels.

    Args:
        network: The network.
        freeze_normalisation: Whether its batch normalisation keeps the statistics and the affine weights that it begins
            with, or that ``start`` loads: they follow neither a client's images nor a server's public ones.
    """
    return freeze_batch_norm_2d(network) if freeze_normalisation else network
