"""Draws training images: textured bodies on textured ground, in two views of the same scene."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from lit_fedad.contracts.randomness import derive_seed
from lit_fedad.pretraining.textures import draw_textures

Shift = tuple[int, int]
"""How far down and right a place of the first view lies in the second, in pixels."""


@dataclass(frozen=True)
class Scenes:
    """An endless stream of scenes, each batch a function of the seed and its number.

    Args:
        size: Side of the pictures in pixels.
        scenes: Scenes a batch.
        bodies: Bodies in a scene.
        textures: Textures drawn for a batch; scenes show different parts of the same ones.
        shift: Largest shift between two views, in pixels.
        lighting: Strength of the differences in brightness and colour between two views.
        seed: Seed of the stream.
    """

    size: int = 96
    scenes: int = 48
    bodies: int = 2
    textures: int = 48
    shift: int = 8
    lighting: float = 2.0
    seed: int = 0

    def views(self, batch: int, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor, Shift]:
        """Draws a batch of scenes, each seen twice.

        The views differ in position, brightness, contrast, colour, shading, focus and noise.

        Args:
            batch: Number of the batch.
            device: Where to draw; the numbers of a CPU and of a GPU differ.

        Returns:
            Two views, in [0, 1] [scenes, 3, size, size] each, and the shift between them.
        """
        generator = torch.Generator(device).manual_seed(derive_seed(self.seed, "scenes", batch))
        side = self.size + self.shift
        scene = self._scene(side, generator)
        down, right = torch.randint(
            -self.shift, self.shift + 1, (2,), generator=generator, device=device
        ).tolist()
        first = scene[:, :, max(down, 0) :, max(right, 0) :][:, :, : self.size, : self.size]
        second = scene[:, :, max(-down, 0) :, max(-right, 0) :][:, :, : self.size, : self.size]
        return self._view(first, generator), self._view(second, generator), (down, right)

    def _scene(self, side: int, generator: torch.Generator) -> Tensor:
        """Draws pictures [scenes, 3, side, side], not yet limited to [0, 1]."""
        layers = self._layers(side, generator).unflatten(0, (self.scenes, self.bodies + 1))
        scene = layers[:, 0]
        for body in range(1, self.bodies + 1):
            cover, shade = _body(self.scenes, side, generator)
            scene = torch.lerp(scene, layers[:, body] * shade, cover)
        return scene

    def _layers(self, side: int, generator: torch.Generator) -> Tensor:
        """Cuts out parts of textures, some of them greyish, at random brightness and contrast."""
        number, spare = self.scenes * (self.bodies + 1), 32
        tiles = draw_textures(self.textures, side + spare, generator)
        which, left, top = (
            torch.randint(high, (number,), generator=generator, device=generator.device).tolist()
            for high in (self.textures, spare + 1, spare + 1)
        )
        parts = torch.stack(
            [tiles[w, :, y : y + side, x : x + side] for w, x, y in zip(which, left, top, strict=True)]
        )
        colourful = _even(number, 0.1, 1, generator) * (_even(number, 0, 1, generator) > 0.35)
        parts = torch.lerp(parts.mean(1, keepdim=True).expand_as(parts), parts, colourful)
        middle = parts.mean((1, 2, 3), keepdim=True)
        return (parts - middle) * _even(number, 0.3, 1.1, generator) + _even(number, 0.15, 0.8, generator)

    def _view(self, picture: Tensor, generator: torch.Generator) -> Tensor:
        number, light = len(picture), self.lighting

        def about(middle: float, spread: float, channels: int = 1) -> Tensor:
            return _even(number, middle - spread * light, middle + spread * light, generator, channels)

        mean = picture.mean((2, 3), keepdim=True)
        picture = (picture - mean) * about(1, 0.25) + mean * about(1, 0.15, channels=3) + about(0, 0.08)
        across, down = _coordinates(self.size, picture.device)
        picture = picture * (1 + about(0, 0.2) * across + about(0, 0.2) * down)
        picture = _blurred(picture, 0.25 * float(torch.rand((), generator=generator, device=picture.device)))
        noise = torch.randn(picture.shape, generator=generator, device=picture.device)
        picture = picture + _even(number, 0, 0.04, generator) * noise
        # Features must not live on colour alone: many real pictures have none.
        grey = _even(number, 0, 1, generator) < 0.3
        return torch.where(grey, picture.mean(1, keepdim=True), picture).clamp(0, 1)


def _body(number: int, side: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draws the cover and shade of bodies with irregular outlines [n, 1, side, side] each."""

    def even(low: float, high: float) -> Tensor:
        return _even(number, low, high, generator)

    x, y = _coordinates(side, generator.device)
    dx, dy, turn, stretch = x - even(-0.8, 0.8), y - even(-0.8, 0.8), even(0, math.pi), 2 ** even(-1, 1)
    along = (dx * turn.cos() + dy * turn.sin()) / stretch
    across = (dy * turn.cos() - dx * turn.sin()) * stretch
    angle, outline, lumps = torch.atan2(across, along), torch.ones_like(along), even(0, 0.7).square()
    for wave in range(2, 9):
        outline = outline + lumps * even(-1, 1) / wave**0.5 * torch.cos(wave * angle + even(0, 2 * math.pi))
    radius = even(0.15, 0.8)
    distance = torch.hypot(along, across) / (radius * outline.clamp(min=0.3))
    cover = ((1 - distance) * radius * even(4, 40) + 0.5).clamp(0, 1) * (even(0, 1) < 0.8)
    relief = even(0.2, 0.8) * (even(0, 1) < 0.5)
    shade = 1 - relief * (0.7 * distance.clamp(max=1).square() - 0.4 * (dx * turn.sin() + dy * turn.cos()))
    return cover, shade


def _blurred(pictures: Tensor, share: float) -> Tensor:
    """Blurs pictures: each pixel gives a share to each neighbour, across and then down."""
    taps = torch.tensor([share, 1 - 2 * share, share], device=pictures.device)
    channels = pictures.shape[1]
    across = F.conv2d(
        pictures, taps.view(1, 1, 1, 3).expand(channels, 1, 1, 3), padding=(0, 1), groups=channels
    )
    return F.conv2d(across, taps.view(1, 1, 3, 1).expand(channels, 1, 3, 1), padding=(1, 0), groups=channels)


def _coordinates(side: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Computes the column and row of each pixel, in [-1, 1]."""
    centres = (torch.arange(side, device=device) + 0.5) / side * 2 - 1
    return centres, centres[:, None]


def _even(number: int, low: float, high: float, generator: torch.Generator, channels: int = 1) -> Tensor:
    """Draws uniform numbers, one for each picture and channel [n, channels, 1, 1]."""
    drawn = torch.rand(number, channels, 1, 1, generator=generator, device=generator.device)
    return low + drawn * (high - low)
