"""A frozen encoder without files, pooled colours of an image, and noise that it sees."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lit_fedad.models.encoders import FrozenEncoder


class Colours(nn.Module):
    """Frozen features: 3 channels at a quarter of the side, 5 at an eighth."""

    channels = (3, 5)
    fingerprint = "colours"
    mean, std = (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.mix = nn.Conv2d(3, 5, 1).requires_grad_(False)

    def forward(self, images):
        return [F.avg_pool2d(images, 4), self.mix(F.avg_pool2d(images, 8))]


def frozen_encoder(hidden: int = 0, **settings) -> FrozenEncoder:
    """Eight features of an image of 16 pixels."""
    return FrozenEncoder(Colours(), size=16, hidden=hidden, **settings)


def images(count: int, seed: int = 0) -> DataLoader:
    """Noise of 16 pixels a side, in batches of four."""
    draw = torch.Generator().manual_seed(seed)
    rows = [{"image": torch.randn(3, 16, 16, generator=draw), "index": i} for i in range(count)]
    return DataLoader(rows, batch_size=4)


NEW = {"image": torch.randn(7, 3, 16, 16, generator=torch.Generator().manual_seed(9))}
"""Images that nobody has trained on."""


def scores_of(client, number):
    """A client's scores of the new images."""
    with torch.no_grad():
        return client.predict_step(NEW).image_score
