"""Surfaces of the embedded default set: five products, each drawn from random numbers alone."""

from collections.abc import Callable

import numpy as np
from numpy.random import Generator
from PIL import Image, ImageDraw

# Surfaces return luminance [size, size] in about [0, 1]. Lengths are in units of 1/256 of the side.

Surface = Callable[[Generator, int], np.ndarray]
"""Draws one picture of a product's surface of so many pixels a side."""


def pixel_centres(size: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns column and row of every pixel centre in units of 1/256 of the side, each [size, size]."""
    centres = (np.arange(size) + 0.5) * 256 / size
    x, y = np.meshgrid(centres, centres)
    return x, y


def smooth_noise(rng: Generator, size: int, columns: float, rows: float) -> np.ndarray:
    """Draws smooth noise of at most unit variance, with so many independent columns and rows, [size, size]."""
    coarse = rng.normal(size=(max(2, round(rows)), max(2, round(columns)))).astype(np.float32)
    return np.asarray(Image.fromarray(coarse).resize((size, size), Image.Resampling.BICUBIC))


def _brick(rng: Generator, size: int) -> np.ndarray:
    """Draws a wall in running bond: rough bricks of different shades, with sunk mortar between them."""
    x, y = pixel_centres(size)
    tilt = rng.normal(0, 0.012)
    x, y = x - tilt * y, y + tilt * x
    height, length = rng.uniform(25, 29), rng.uniform(62, 70)
    v = y / height + 8 + rng.uniform()
    course = np.floor(v).astype(int)
    u = x / length + 8 + rng.uniform() + 0.5 * (course % 2) + rng.normal(0, 0.05, size=64)[course]
    column = np.floor(u).astype(int)
    along, down = (u - column) * length, (v - course) * height
    to_joint = np.minimum(np.minimum(along, length - along), np.minimum(down, height - down))
    chipped = 1.1 * smooth_noise(rng, size, 45, 45) + 0.6 * smooth_noise(rng, size, 110, 110)
    face = ((to_joint + chipped - 2.2) / 1.6 + 0.5).clip(0, 1)
    shade = rng.normal(0.42, 0.05, size=(64, 64))[course, column]
    edges = 0.10 * np.exp(-down / 3) - 0.14 * np.exp(-(height - down) / 3)  # the light comes from above
    grit = 0.055 * smooth_noise(rng, size, 170, 170) + 0.04 * smooth_noise(rng, size, 80, 50)
    pits = 0.22 * np.clip(smooth_noise(rng, size, 90, 90) - 1.1, 0, 1)
    mortar = 0.72 + 0.06 * smooth_noise(rng, size, 190, 190) - 0.16 * (1 - down / 3.5).clip(0, 1)
    return mortar + face * (shade + edges + grit - pits - mortar)


def _grass(rng: Generator, size: int) -> np.ndarray:
    """Draws bent blades that lie over each other; the deeper ones are darker."""
    blades, fine = 1500, 2 * size
    root = rng.uniform(-25, 281, size=(blades, 1, 2))
    heading = rng.uniform(0, 2 * np.pi) + rng.normal(0, 1.2, size=(blades, 1))
    along = np.linspace(0, 1, 7)
    angle = heading + rng.normal(0, 0.5, size=(blades, 1)) * along
    steps = np.stack([np.cos(angle), np.sin(angle)], axis=-1)
    spine = root + np.cumsum(steps * rng.uniform(4, 10, size=(blades, 1, 1)), axis=1)
    half_width = rng.uniform(0.8, 1.8, size=(blades, 1, 1)) * np.sqrt(1 - 0.96 * along**2)[:, None]
    side = half_width * np.stack([-np.sin(angle), np.cos(angle)], axis=-1)
    top = _topmost(np.concatenate([spine + side, (spine - side)[:, ::-1]], axis=1), fine)
    shade = rng.normal(0.63, 0.14, blades).clip(0.3, 1) * np.linspace(0.35, 1, blades)
    return _halved(shade[top] + 0.05 * smooth_noise(rng, fine, 220, 220))


def _gravel(rng: Generator, size: int) -> np.ndarray:
    """Draws a heap of crushed stones: smaller ones mostly lie on larger ones, each with its own shade and roughness."""
    side, loose, corners, fine = 22, 250, 9, 2 * size
    ground = np.stack(np.meshgrid(*[np.linspace(-12, 268, side)] * 2), axis=-1).reshape(-1, 2)
    ground = rng.permutation(ground) + rng.uniform(-4, 4, size=ground.shape)  # leaves no gap
    centre = np.concatenate([ground, rng.uniform(-20, 276, size=(loose, 2))])
    stones = len(centre)
    radius = rng.gamma(9, 1.3, size=stones).clip(6, 24)
    radius = radius[np.argsort(rng.normal(-radius, 4))]
    turn, stretch = rng.uniform(0, np.pi, size=stones), np.sqrt(rng.uniform(1, 1.7, size=stones))
    angle = (np.arange(corners) + rng.uniform(-0.35, 0.35, size=(stones, corners))) * 2 * np.pi / corners
    length, width = (radius * stretch)[:, None], (radius / stretch)[:, None]
    corner = rng.uniform(0.8, 1.1, size=(stones, corners))
    along, across = corner * np.cos(angle) * length, corner * np.sin(angle) * width
    cos, sin = np.cos(turn)[:, None], np.sin(turn)[:, None]
    outline = np.stack([along * cos - across * sin, along * sin + across * cos], axis=-1)
    top = _topmost(centre[:, None] + outline, fine)
    x, y = pixel_centres(fine)
    dx, dy = np.clip((np.stack([x, y]) - centre[top].transpose(2, 0, 1)) / radius[top], -1, 1)
    from_centre = np.minimum(dx**2 + dy**2, 1)
    light = 0.62 + 0.5 * np.sqrt(1 - 0.9 * from_centre) - 0.18 * (0.6 * dx + 0.8 * dy) - 0.3 * from_centre**3
    shade = rng.normal(0.5, 0.1, size=stones).clip(0.25, 0.8)
    roughness = rng.uniform(0.01, 0.07, size=stones)
    return _halved(shade[top] * light + roughness[top] * smooth_noise(rng, fine, 200, 200))


def _topmost(outlines: np.ndarray, size: int) -> np.ndarray:
    """Draws polygons [N, corners, 2] one over the other and returns the number of the topmost at each pixel."""
    canvas = Image.new("I", (size, size))
    draw = ImageDraw.Draw(canvas)
    for number, outline in enumerate(outlines * (size / 256)):
        draw.polygon(outline.ravel().tolist(), fill=number)
    return np.asarray(canvas)


def _halved(fine: np.ndarray) -> np.ndarray:
    """Averages 2 x 2 pixels, which smooths the outlines of what was drawn."""
    size = len(fine) // 2
    return fine.reshape(size, 2, size, 2).mean(axis=(1, 3))


def _weave(rng: Generator, size: int) -> np.ndarray:
    """Draws twill: every thread passes over two others, then under two, one step further in every row."""
    x, y = pixel_centres(size)
    angle, pitch = rng.normal(0, 0.02), rng.uniform(11, 13)
    wobble = 2.2 * smooth_noise(rng, size, 5, 5), 2.2 * smooth_noise(rng, size, 5, 5)
    u = (x * np.cos(angle) + y * np.sin(angle) + wobble[0]) / pitch + 64 + rng.uniform()
    v = (y * np.cos(angle) - x * np.sin(angle) + wobble[1]) / pitch + 64 + rng.uniform()
    warp_on_top = (np.floor(u) + np.floor(v)) % 4 < 2
    threads = rng.normal(0, 0.035, size=(2, 256))

    def thread(across: np.ndarray, along: np.ndarray, shade: float, shades: np.ndarray) -> np.ndarray:
        number = np.floor(across)
        offset = 2 * (across - number) - 1
        arch = np.sin(np.pi * ((along + number) % 2 + 0.001) / 2)  # highest halfway over the two threads
        twist = 0.035 * np.sin(2 * np.pi * (2.6 * along + 0.9 * offset))
        return (
            (shade + shades[number.astype(int) % 256] + twist)
            * np.sqrt(1 - 0.75 * offset**2)
            * (0.6 + 0.4 * arch)
        )

    warp, weft = thread(u, v, 0.56, threads[0]), thread(v, u, 0.86, threads[1])
    fibres = 0.05 * smooth_noise(rng, size, 200, 60) + 0.05 * smooth_noise(rng, size, 60, 200)
    return np.where(warp_on_top, warp, weft) + fibres + 0.03 * smooth_noise(rng, size, 6, 6)


def _grain(rng: Generator, size: int) -> np.ndarray:
    """Draws planed wood: year rings cut lengthwise, fibres and pores."""
    x, y = pixel_centres(size)
    tilt = rng.normal(0, 0.04)
    depth = y + tilt * x + 9 * smooth_noise(rng, size, 3, 4) + 2.0 * smooth_noise(rng, size, 5, 14)
    ring = (depth / rng.uniform(17, 23) + rng.uniform()) % 1
    late_wood = ring**3 * np.clip((1 - ring) * 9, 0, 1)  # darkens slowly, ends sharply
    fibres = 0.05 * smooth_noise(rng, size, 14, 190) + 0.035 * smooth_noise(rng, size, 40, 230)
    pores = np.clip(smooth_noise(rng, size, 26, 170) - 1.25, 0, 1)
    return 0.64 - 0.34 * late_wood + fibres - 0.22 * pores + 0.05 * smooth_noise(rng, size, 3, 3)


SURFACES: dict[str, Surface] = {
    "brick": _brick,
    "grass": _grass,
    "gravel": _gravel,
    "weave": _weave,
    "grain": _grain,
}


# Colours of dark, middling and bright places.
_COLOURS = {
    "brick": ((52, 24, 22), (148, 78, 62), (206, 192, 176)),
    "grass": ((16, 28, 14), (86, 116, 54), (206, 214, 152)),
    "gravel": ((26, 26, 30), (124, 121, 120), (228, 224, 216)),
    "weave": ((20, 25, 48), (72, 88, 130), (178, 188, 204)),
    "grain": ((70, 40, 22), (164, 114, 68), (222, 184, 132)),
}


def coloured(luminance: np.ndarray, product: str) -> np.ndarray:
    """Colours a surface: [size, size] to [size, size, 3], both in [0, 1]."""
    stops = np.array(_COLOURS[product]) / 255
    return np.stack([np.interp(luminance, (0, 0.5, 1), channel) for channel in stops.T], axis=-1)
