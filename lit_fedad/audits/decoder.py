"""A decoder from features to images, trained on public ones: where places are kept, it inverts better than a search.

After Dosovitskiy and Brox (CVPR 2016), who train a network on public images to invert the features of another: what it
has learned of images stands in for what features no longer say. Drawn scenes, the default, show nothing of any client.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lit_fedad.contracts.randomness import generator, seeded
from lit_fedad.core.errors import UserError
from lit_fedad.pretraining.scenes import Scenes

_WIDTH, _BATCH, _LEARNING_RATE = 96, 16, 2e-3

Batches = Callable[[int], Tensor]
"""Images [n, 3, H, W] in [0, 1] of the batch of a number."""


def drawn_scenes(size: tuple[int, int], seed: int) -> Batches:
    """Returns batches of drawn scenes of a height and width, by their seed."""
    scenes = Scenes(size=max(size), scenes=_BATCH, textures=_BATCH, seed=seed)
    return lambda number: scenes.views(number)[0][:, :, : size[0], : size[1]]


def drawn_from(images: Tensor, size: tuple[int, int], seed: int) -> Batches:
    """Returns batches of public images uint8 [P, 3, S, S], S the larger of height and width, each mirrored or not."""

    def batch(number: int) -> Tensor:
        draw = generator(seed, "public", number)
        chosen = images[torch.randint(len(images), (_BATCH,), generator=draw)] / 255
        mirrored = torch.rand(_BATCH, generator=draw) < 0.5
        chosen[mirrored] = chosen[mirrored].flip(3)
        return chosen[:, :, : size[0], : size[1]]

    return batch


class Decoder(nn.Module):
    """A convolutional network from features on a grid to images.

    Args:
        channels: Channels C of the features.
        grid: Rows and columns of the grid.
        size: Height and width of the images.
    """

    mean: Tensor
    scale: Tensor

    def __init__(self, channels: int, grid: tuple[int, int], size: tuple[int, int]) -> None:
        super().__init__()
        self.grid, self.size = grid, size
        self.register_buffer("mean", torch.zeros(channels))
        self.register_buffer("scale", torch.ones(channels))
        doublings = max(1, round(max(size) / max(grid)).bit_length() - 1)
        widths = [max(16, _WIDTH >> step) for step in range(doublings + 1)]
        layers: list[nn.Module] = [nn.Conv2d(channels, _WIDTH, 3, padding=1), nn.ReLU()]
        for given, made in pairwise(widths):
            layers += [nn.Upsample(scale_factor=2), nn.Conv2d(given, made, 3, padding=1), nn.ReLU()]
        self.layers = nn.Sequential(*layers, nn.Conv2d(widths[-1], 3, 3, padding=1))

    def forward(self, features: Tensor) -> Tensor:
        """Computes images in [0, 1] [n, 3, H, W] of features [n, P, C]."""
        maps = ((features - self.mean) / self.scale).mT.unflatten(2, self.grid)
        images = F.interpolate(self.layers(maps), self.size, mode="bilinear", align_corners=False)
        return images.sigmoid()


def train_decoder(
    encode: Callable[[Tensor], Tensor],
    grid: tuple[int, int],
    size: tuple[int, int],
    steps: int,
    seed: int,
    public: Batches,
    on_step: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[Decoder, list[float]]:
    """Trains a decoder on public images, a new batch a step, by the mean absolute error.

    Args:
        encode: Function from images [n, 3, H, W] in [0, 1] to features [n, P, C].
        grid: Rows and columns of the P places.
        size: Height and width of the images.
        steps: Steps of Adam; the learning rate falls to 0 along a cosine.
        seed: Seed of the initial weights.
        public: The images, of that size.
        on_step: Called with the number of steps done and of all.

    Returns:
        The decoder, and the loss before each step.

    Raises:
        UserError: If features have no places.
    """

    def batch(number: int) -> tuple[Tensor, Tensor]:
        shown = public(number)
        with torch.no_grad():
            return shown, encode(shown)

    first = batch(0)[1]
    if first.shape[1] != grid[0] * grid[1]:
        raise UserError("a decoder needs features in their places, and these have none")
    with seeded(seed, "decoder"):
        decoder = Decoder(first.shape[2], grid, size).to(first.device)
    decoder.mean.copy_(first.flatten(0, 1).mean(0))
    decoder.scale.copy_(first.flatten(0, 1).std(0).clamp(min=1e-6))
    optimizer = torch.optim.Adam(decoder.parameters(), _LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    losses = []
    for step in range(steps):
        shown, features = batch(step)
        loss = (decoder(features) - shown.to(features.device)).abs().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(float(loss.detach()))
        on_step(step + 1, steps)
    return decoder.eval(), losses
