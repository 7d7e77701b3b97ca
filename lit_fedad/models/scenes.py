"""Random training images: textured bodies on textured ground, in two views of the same scene."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from lit_fedad.contracts.randomness import derive_seed


class Dials:
    """Random parameters of a texture family's formula: each call draws a parameter, one value for each tile [n, 1, 1].

    Args:
        tiles: Number of tiles n.
        generator: Draws the values, on its device.
    """

    def __init__(self, tiles: int, generator: torch.Generator) -> None:
        self._shape, self._generator = (tiles, 1, 1), generator

    def even(self, low: float, high: float) -> Tensor:
        """Draws values uniformly between two bounds."""
        drawn = torch.rand(self._shape, generator=self._generator, device=self._generator.device)
        return low + drawn * (high - low)

    def log(self, low: float, high: float) -> Tensor:
        """Draws values uniformly on a logarithmic scale, for frequencies and ratios."""
        return self.even(math.log(low), math.log(high)).exp()

    def choice(self, *options: Tensor) -> Tensor:
        """Chooses one of several fields [n, S, S] for each tile."""
        number = self.even(0, len(options)).long().clamp(max=len(options) - 1)
        return torch.stack(options).take_along_dim(number[None], dim=0)[0]

    def seed(self) -> Tensor:
        """Draws seeds for `lattice_noise`."""
        return self.even(0, 1 << 20).long()


Family = Callable[[Tensor, Tensor, Dials], Tensor]
"""Computes a field in [0, 1] [n, S, S] from column and row in pixels [n, S, S] each, and random parameters."""


def lattice_noise(column: Tensor, row: Tensor, seed: Tensor) -> Tensor:
    """Hashes each point of the integer lattice to a number in [0, 1), the same on every device."""
    mixed = (column * 374761393 + row * 668265263 + seed * 1442695041) & 0x7FFFFFFF
    for shift, factor in ((13, 1274126177), (15, 974634281)):
        mixed = ((mixed ^ (mixed >> shift)) * factor) & 0x7FFFFFFF
    return ((mixed ^ (mixed >> 14)) & 0xFFFFFF).float() / 0x1000000


def smooth_noise(u: Tensor, v: Tensor, seed: Tensor) -> Tensor:
    """Interpolates `lattice_noise` smoothly between the points (value noise)."""
    column, row = u.floor(), v.floor()
    across, down = u - column, v - row
    across, down = across * across * (3 - 2 * across), down * down * (3 - 2 * down)
    left, top = column.long(), row.long()
    upper = torch.lerp(lattice_noise(left, top, seed), lattice_noise(left + 1, top, seed), across)
    lower = torch.lerp(lattice_noise(left, top + 1, seed), lattice_noise(left + 1, top + 1, seed), across)
    return torch.lerp(upper, lower, down)


def fractal_noise(u: Tensor, v: Tensor, seed: Tensor, gain: Tensor, octaves: int) -> Tensor:
    """Sums noise of rising frequency and falling strength; in [0, 1]."""
    total, strength, whole = torch.zeros_like(u), torch.ones_like(gain), torch.zeros_like(gain)
    for octave in range(octaves):
        total = total + strength * smooth_noise(u * 2**octave, v * 2**octave, seed + octave)
        whole, strength = whole + strength, strength * gain
    return total / whole


def clouds(x: Tensor, y: Tensor, dials: Dials) -> Tensor:
    """Draws stretched fractal noise: itself, its ridges, its level lines, or blobs above a level."""
    frequency, stretch = dials.log(0.03, 0.3), dials.log(0.5, 2)
    gain = dials.even(0.3, 0.8)
    noise = fractal_noise(x * frequency * stretch, y * frequency / stretch, dials.seed(), gain, octaves=4)
    return dials.choice(
        (2 * noise - 0.5).clamp(0, 1),
        (1 - 4 * (noise - 0.5).abs()).clamp(0, 1),
        0.5 + 0.5 * torch.sin(2 * math.pi * dials.even(2, 8) * noise),
        _soft_step(noise - dials.even(0.4, 0.6), 12),
    )


def swirls(x: Tensor, y: Tensor, dials: Dials) -> Tensor:
    """Draws fractal noise at coordinates that other noise has displaced."""
    frequency, pull = dials.log(0.02, 0.1), dials.even(0.5, 4)
    u, v = x * frequency, y * frequency
    displaced = u + pull * smooth_noise(u, v, dials.seed()), v + pull * smooth_noise(u, v, dials.seed())
    noise = fractal_noise(*displaced, dials.seed(), dials.even(0.3, 0.7), octaves=3)
    return (0.5 + dials.even(1.5, 6) * (noise - 0.5)).clamp(0, 1)


def cells(x: Tensor, y: Tensor, dials: Dials) -> Tensor:
    """Draws cells about scattered points (Worley noise): walls, discs, cones, or shaded cells."""
    frequency, stretch, scatter = dials.log(0.04, 0.2), dials.log(0.7, 1.4), dials.even(0.3, 1)
    u, v, seeds = x * frequency * stretch, y * frequency / stretch, [dials.seed() for _ in range(3)]
    nearest, second, shade = torch.full_like(u, 9), torch.full_like(u, 9), torch.zeros_like(u)
    for column, row in _neighbourhood(u, v):
        du = u - column - 0.5 - scatter * (lattice_noise(column, row, seeds[0]) - 0.5)
        dv = v - row - 0.5 - scatter * (lattice_noise(column, row, seeds[1]) - 0.5)
        distance = torch.hypot(du, dv)
        closer = distance < nearest
        second = torch.where(closer, nearest, torch.minimum(second, distance))
        shade = torch.where(closer, lattice_noise(column, row, seeds[2]), shade)
        nearest = torch.minimum(nearest, distance)
    walls = ((second - nearest) / dials.even(0.05, 0.5)).clamp(0, 1)
    discs = _soft_step(dials.even(0.2, 0.5) - nearest, 8)
    return dials.choice(walls, discs, nearest.clamp(0, 1), walls * (0.3 + 0.7 * shade))


def stripes(x: Tensor, y: Tensor, dials: Dials) -> Tensor:
    """Draws stripes bent by noise: one system, or two that cut, cover or blend each other."""
    bend = dials.even(0, 1.2).square() * smooth_noise(x * 0.05, y * 0.05, dials.seed())
    duty, slope = dials.even(-0.6, 0.6), dials.log(0.7, 8)

    def system(angle: Tensor, frequency: Tensor) -> Tensor:
        phase = (x * angle.cos() + y * angle.sin()) * frequency + bend
        return _soft_step((2 * math.pi * phase).sin() + duty, slope / 2)

    angle, frequency = dials.even(0, math.pi), dials.log(0.02, 0.2)
    first = system(angle, frequency)
    second = system(angle + dials.even(0.5, 2.2), frequency * dials.log(0.4, 2))
    return dials.choice(first, first * second, torch.maximum(first, second), (first + second) / 2)


def lattice(x: Tensor, y: Tensor, dials: Dials) -> Tensor:
    """Draws one motif in each cell of a grid with shifted rows: disc, box, ring, cross or diamond."""
    frequency, aspect = dials.log(0.04, 0.18), dials.log(0.4, 2.5)
    v = y * frequency * aspect
    row = v.floor()
    u = x * frequency + row * dials.even(0, 1)
    column = u.floor()
    first, second = (lattice_noise(column.long(), row.long(), dials.seed()) for _ in range(2))
    scatter, size = dials.even(0, 0.25), dials.even(0.15, 0.42)
    a = u - column - 0.5 + scatter * (first - 0.5)
    b = v - row - 0.5 + scatter * (second - 0.5)
    inside = dials.choice(
        size - torch.hypot(a, b),
        size - torch.maximum(a.abs(), b.abs()),
        0.08 - (torch.hypot(a, b) - size).abs(),
        0.07 - torch.minimum(a.abs(), b.abs()),
        size - a.abs() - b.abs(),
    )
    return _soft_step(inside, 12) * (1 - dials.even(0, 0.6) * first)


def strokes(x: Tensor, y: Tensor, dials: Dials) -> Tensor:
    """Draws short scattered strokes, more or less in one direction."""
    frequency = dials.log(0.05, 0.15)
    u, v, seeds = x * frequency, y * frequency, [dials.seed() for _ in range(4)]
    turn, spread, fading = dials.even(0, 1), dials.even(0, 1), dials.even(0, 0.6)
    length, width = dials.even(0.2, 0.9), dials.even(0.04, 0.2)
    field = torch.zeros_like(u)
    for column, row in _neighbourhood(u, v):
        place, lift, angle, shade = (lattice_noise(column, row, seed) for seed in seeds)
        angle = math.pi * (turn + spread * (angle - 0.5))
        du, dv = u - column - place, v - row - lift
        along, across = du * angle.cos() + dv * angle.sin(), dv * angle.cos() - du * angle.sin()
        outside = torch.hypot((along.abs() - length).clamp(min=0), across)
        field = torch.maximum(field, (1 - fading * shade) * _soft_step(width - outside, 10))
    return field


FAMILIES: tuple[Family, ...] = (clouds, swirls, cells, stripes, lattice, strokes)


def draw_textures(tiles: int, size: int, generator: torch.Generator) -> Tensor:
    """Draws tiles in [0, 1] [tiles, 3, size, size] of all families in turn, rotated, scaled and coloured at random."""
    drawn = torch.empty(tiles, size, size, device=generator.device)
    for number, family in enumerate(FAMILIES):
        part = drawn[number :: len(FAMILIES)]
        if len(part):
            dials = Dials(len(part), generator)
            x, y = _places(size, dials)
            part[:] = family(x, y, dials)
    dials = Dials(tiles, generator)
    x, y = _places(size, dials)
    frequency = dials.log(0.1, 0.6)
    roughness = smooth_noise(x * frequency, y * frequency, dials.seed()) - 0.5
    return _coloured((drawn + dials.even(0, 0.5) * roughness).clamp(0, 1), generator)


def _places(size: int, dials: Dials) -> tuple[Tensor, Tensor]:
    """Computes column and row of every pixel in a plane that is rotated, scaled and shifted at random."""
    angle, zoom = dials.even(0, 2 * math.pi), dials.log(0.8, 1.25)
    side = torch.arange(size, device=angle.device) - size / 2
    x, y = zoom * side, zoom * side[:, None]
    return (
        x * angle.cos() + y * angle.sin() + dials.even(0, 997),
        y * angle.cos() - x * angle.sin() + dials.even(0, 997),
    )


def _coloured(field: Tensor, generator: torch.Generator) -> Tensor:
    """Colours a field by three random colours, for low, middle and high values."""
    stops = torch.rand(3, len(field), 3, 1, 1, generator=generator, device=field.device)
    level = 2 * field[:, None]
    return torch.where(
        level < 1, torch.lerp(stops[0], stops[1], level), torch.lerp(stops[1], stops[2], level - 1)
    )


def _neighbourhood(u: Tensor, v: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields column and row of the lattice cell of each pixel, and of its eight neighbours."""
    column, row = u.floor().long(), v.floor().long()
    for right in (-1, 0, 1):
        for down in (-1, 0, 1):
            yield column + right, row + down


def _soft_step(value: Tensor, slope: float | Tensor) -> Tensor:
    """Computes a ramp from 0 for negative to 1 for positive values, which is 0.5 at 0."""
    return (slope * value + 0.5).clamp(0, 1)


Shift = tuple[int, int]
"""How far down and right a place of the first view lies in the second, in pixels."""


@dataclass(frozen=True)
class Scenes:
    """An endless stream of scenes; each batch depends only on the seed and its number.

    Args:
        size: Side of the pictures in pixels.
        scenes: Number of scenes in a batch.
        bodies: Number of bodies in a scene.
        textures: Number of textures drawn for a batch; scenes show different parts of the same textures.
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
            device: Device that draws; a CPU and a GPU draw different numbers.

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
        """Cuts parts out of textures, some of them greyish, at random brightness and contrast."""
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
        across, down = _pixel_places(self.size, picture.device)
        picture = picture * (1 + about(0, 0.2) * across + about(0, 0.2) * down)
        picture = _blurred(picture, 0.25 * float(torch.rand((), generator=generator, device=picture.device)))
        noise = torch.randn(picture.shape, generator=generator, device=picture.device)
        picture = picture + _even(number, 0, 0.04, generator) * noise
        # Some pictures are grey, so that features do not depend on colour alone, which many real pictures lack.
        grey = _even(number, 0, 1, generator) < 0.3
        return torch.where(grey, picture.mean(1, keepdim=True), picture).clamp(0, 1)


def _body(number: int, side: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draws the cover and shade of bodies with irregular outlines [n, 1, side, side] each."""

    def even(low: float, high: float) -> Tensor:
        return _even(number, low, high, generator)

    x, y = _pixel_places(side, generator.device)
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


def _pixel_places(side: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Computes the column and row of each pixel, in [-1, 1]."""
    centres = (torch.arange(side, device=device) + 0.5) / side * 2 - 1
    return centres, centres[:, None]


def _even(number: int, low: float, high: float, generator: torch.Generator, channels: int = 1) -> Tensor:
    """Draws uniform numbers, one for each picture and channel [n, channels, 1, 1]."""
    drawn = torch.rand(number, channels, 1, 1, generator=generator, device=generator.device)
    return low + drawn * (high - low)
