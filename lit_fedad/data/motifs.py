"""Embedded sets of drawn motifs: ten normal families and three anomalous ones, or ten classes.

A motif is a field of values in [0, 1] over the picture that blends two random colours. All colours, positions and
scales are random, so only the form distinguishes families. Light falls from above, as in photographs: a rotated picture
looks unlike the others.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.random import Generator
from torch import Tensor

from lit_fedad.contracts.randomness import numpy_generator
from lit_fedad.core.bounds import at_least
from lit_fedad.data.labelled import HALF, LabelledSet
from lit_fedad.data.semantic import SemanticSet, join

Motif = Callable[[np.ndarray, np.ndarray, Generator], np.ndarray]
"""Maps column and row of each pixel, [N, S, S] each, in units of the side from the middle, to the field [N, S, S]."""


def motifs(
    size: int = 32,
    train_per_class: int = 120,
    test_per_class: int = 40,
    train_per_set: int = 20,
    test_per_set: int = 130,
    mean: Sequence[float] = (0, 0, 0),
    std: Sequence[float] = (1, 1, 1),
    seed: int = 0,
) -> SemanticSet:
    """Draws a set of ten normal families and three anomaly sets of motifs.

    Args:
        size: Side in pixels.
        train_per_class: Training images of each of the 10 normal classes.
        test_per_class: Test images of each normal class.
        train_per_set: Training images (contaminants) of each of the 3 anomaly sets.
        test_per_set: Test images of each anomaly set.
        mean: Mean of the three channels, for normalisation; by default inputs are in [0, 1].
        std: Standard deviation of the three channels, likewise.
        seed: Seed of all images. Those of a motif do not depend on the others.

    Raises:
        UserError: A number is too small.
    """
    at_least("data", 1, test_per_set=test_per_set)
    at_least("data", 0, train_per_set=train_per_set)
    normal = _normal("motifs", train_per_class, test_per_class, size, seed)
    anomalies = {
        name: _drawn(name, {name: motif}, (train_per_set, test_per_set), size, seed)
        for name, motif in ANOMALOUS.items()
    }
    return join(replace(normal, mean=mean, std=std), anomalies, "motifs")


def motif_classes(
    train_per_class: int = 200,
    test_per_class: int = 50,
    size: int = 32,
    mean: Sequence[float] = HALF,
    std: Sequence[float] = HALF,
    seed: int = 0,
) -> LabelledSet:
    """Draws the ten normal families as classes: an embedded substitute for CIFAR-10.

    Args:
        train_per_class: Training images of each class.
        test_per_class: Test images of each class.
        size: Side in pixels.
        mean: As in `LabelledSet`.
        std: As in `LabelledSet`.
        seed: As in `motifs`; the same numbers and seed give its normal images.

    Raises:
        UserError: A number is too small.
    """
    drawn = _normal("motif_classes", train_per_class, test_per_class, size, seed)
    return replace(drawn, mean=mean, std=std)


def _normal(name: str, train_per_class: int, test_per_class: int, size: int, seed: int) -> LabelledSet:
    """Draws the ten normal families."""
    at_least("data", 8, size=size)
    at_least("data", 1, train_per_class=train_per_class, test_per_class=test_per_class)
    return _drawn(name, NORMAL, (train_per_class, test_per_class), size, seed)


def _drawn(
    name: str, families: Mapping[str, Motif], numbers: tuple[int, int], size: int, seed: int
) -> LabelledSet:
    """Draws the given numbers of training and of test images of each family."""

    def part(purpose: str, number: int) -> tuple[Tensor, Tensor]:
        images = [
            _coloured(motif, number, size, numpy_generator(seed, "motifs", purpose, family))
            for family, motif in families.items()
        ]
        labels = torch.arange(len(families)).repeat_interleave(number)
        return torch.from_numpy(np.concatenate(images)), labels

    train, test = part("train", numbers[0]), part("test", numbers[1])
    return LabelledSet(name, tuple(families), *train, *test)


def _coloured(motif: Motif, number: int, size: int, rng: Generator) -> np.ndarray:
    """Draws pictures of one family, uint8 [number, 3, size, size]."""
    centres = (np.arange(size, dtype=np.float32) + 0.5) / size - 0.5
    angle = _uniform(rng, number, -0.3, 0.3)  # a small tilt only, so that stripes stay upright
    x = centres * np.cos(angle) + centres[:, None] * np.sin(angle)
    y = centres[:, None] * np.cos(angle) - centres * np.sin(angle)
    field = motif(x, y, rng)[:, None]
    # Two colours on opposite sides of a middle: they always differ.
    first = rng.uniform(-0.45, 0.45, (number, 3, 1, 1))
    first *= 0.35 / np.abs(first).max(axis=1, keepdims=True).clip(max=0.35)
    second = -first * rng.uniform(0.3, 1, (number, 1, 1, 1))
    light = 1.12 - 0.5 * (centres[:, None] + 0.5) * rng.uniform(0.6, 1.2, (number, 1, 1, 1))
    noise = rng.normal(0, 0.03, (number, 3, size, size))
    # Families cover different shares of the picture; a random middle hides that in the mean colour.
    middle = rng.uniform(0.35, 0.65, (number, 3, 1, 1))
    pixels = (middle + first + field * (second - first)) * light + noise
    return (255 * pixels).round().clip(0, 255).astype(np.uint8)


def _uniform(rng: Generator, number: int, low: float, high: float) -> np.ndarray:
    """Draws one value for each picture, [number, 1, 1]."""
    return rng.uniform(low, high, (number, 1, 1))


def _edge(distance: np.ndarray) -> np.ndarray:
    """Returns 1 where a signed distance (in units of the side) is positive, 0 where it is negative, with soft edges."""
    return (distance / 0.03 + 0.5).clip(0, 1)


def _square(phase: np.ndarray) -> np.ndarray:
    """Computes a square wave of period 1 with soft edges, in [0, 1]."""
    return (2 * np.sin(2 * np.pi * phase) + 0.5).clip(0, 1)


def _moved(x: np.ndarray, y: np.ndarray, rng: Generator, by: float) -> tuple[np.ndarray, np.ndarray]:
    """Moves the origin of the coordinates to a random point, at most ``by`` off the middle in both directions."""
    number = len(x)
    return x - _uniform(rng, number, -by, by), y - _uniform(rng, number, -by, by)


def _stripes(x: np.ndarray, y: np.ndarray, rng: Generator) -> np.ndarray:
    return _square(x * _uniform(rng, len(x), 2.5, 5) + _uniform(rng, len(x), 0, 1))


def _checks(x: np.ndarray, y: np.ndarray, rng: Generator) -> np.ndarray:
    x, y = _moved(x, y, rng, 0.5)
    scale = _uniform(rng, len(x), 1.5, 3)
    return (8 * np.sin(2 * np.pi * scale * x) * np.sin(2 * np.pi * scale * y) / 2 + 0.5).clip(0, 1)


def _dots(x: np.ndarray, y: np.ndarray, rng: Generator) -> np.ndarray:
    x, y = _moved(x, y, rng, 0.5)
    scale, radius = _uniform(rng, len(x), 3, 5), _uniform(rng, len(x), 0.22, 0.36)
    distance = np.hypot((scale * x) % 1 - 0.5, (scale * y) % 1 - 0.5)
    return _edge((radius - distance) / scale)


def _rings(x: np.ndarray, y: np.ndarray, rng: Generator) -> np.ndarray:
    x, y = _moved(x, y, rng, 0.25)
    return _square(np.hypot(x, y) * _uniform(rng, len(x), 3, 6) + _uniform(rng, len(x), 0, 1))


def _waves(x: np.ndarray, y: np.ndarray, rng: Generator) -> np.ndarray:
    number = len(x)
    swing = _uniform(rng, number, 0.06, 0.11) * np.sin(
        2 * np.pi * (x * _uniform(rng, number, 1, 2) + _uniform(rng, number, 0, 1))
    )
    return _square((y + swing) * _uniform(rng, number, 3, 5) + _uniform(rng, number, 0, 1))


def _rays(x: np.ndarray, y: np.ndarray, rng: Generator) -> np.ndarray:
    x, y = _moved(x, y, rng, 0.25)
    beams = rng.integers(4, 9, (len(x), 1, 1))
    return _square(np.arctan2(y, x) / (2 * np.pi) * beams + _uniform(rng, len(x), 0, 1))


def _bricks(x: np.ndarray, y: np.ndarray, rng: Generator) -> np.ndarray:
    x, y = _moved(x, y, rng, 0.5)
    scale = _uniform(rng, len(x), 3.5, 5.5)
    row = np.floor(scale * y)
    across, down = (scale * x / 2 + row / 2) % 1, (scale * y) % 1
    joint = np.minimum(2 * np.minimum(across, 1 - across), np.minimum(down, 1 - down))
    return _edge((joint - 0.12) / scale)


def _zigzag(x: np.ndarray, y: np.ndarray, rng: Generator) -> np.ndarray:
    number = len(x)
    teeth = np.abs((x * _uniform(rng, number, 2, 4) + _uniform(rng, number, 0, 1)) % 1 - 0.5)
    return _square(
        (y + _uniform(rng, number, 0.3, 0.5) * teeth) * _uniform(rng, number, 3, 5)
        + _uniform(rng, number, 0, 1)
    )


def _grid(x: np.ndarray, y: np.ndarray, rng: Generator) -> np.ndarray:
    x, y = _moved(x, y, rng, 0.5)
    scale = _uniform(rng, len(x), 3, 5)
    line = np.minimum(np.abs((scale * x) % 1 - 0.5), np.abs((scale * y) % 1 - 0.5))
    return _edge((0.14 - line) / scale)


def _spiral(x: np.ndarray, y: np.ndarray, rng: Generator) -> np.ndarray:
    x, y = _moved(x, y, rng, 0.2)
    arms = rng.integers(1, 4, (len(x), 1, 1))
    turns = np.hypot(x, y) * _uniform(rng, len(x), 3, 5)
    return _square(turns + np.arctan2(y, x) / (2 * np.pi) * arms + _uniform(rng, len(x), 0, 1))


def _cells(x: np.ndarray, y: np.ndarray, rng: Generator) -> np.ndarray:
    """Draws the borders of the cells about random points."""
    points = rng.uniform(-0.6, 0.6, (2, len(x), 12, 1, 1)).astype(np.float32)
    distances = np.hypot(x[:, None] - points[0], y[:, None] - points[1])
    nearest, second = np.moveaxis(np.partition(distances, 1, axis=1)[:, :2], 1, 0)
    return _edge(second - nearest - 0.06)


def _strokes(x: np.ndarray, y: np.ndarray, rng: Generator) -> np.ndarray:
    """Draws a few straight strokes."""
    ax, ay, bx, by = rng.uniform(-0.5, 0.5, (4, len(x), 9, 1, 1)).astype(np.float32)
    dx, dy, px, py = bx - ax, by - ay, x[:, None] - ax, y[:, None] - ay
    along = ((px * dx + py * dy) / (dx**2 + dy**2)).clip(0, 1)
    distance = np.hypot(px - along * dx, py - along * dy).min(axis=1)
    return _edge(_uniform(rng, len(x), 0.03, 0.07) - distance)


def _saddles(x: np.ndarray, y: np.ndarray, rng: Generator) -> np.ndarray:
    """Draws level lines of a saddle: hyperbolas."""
    x, y = _moved(x, y, rng, 0.2)
    return _square((x**2 - y**2) * _uniform(rng, len(x), 6, 12) + _uniform(rng, len(x), 0, 1))


NORMAL: dict[str, Motif] = {
    "checks": _checks,
    "rings": _rings,
    "rays": _rays,
    "bricks": _bricks,
    "grid": _grid,
    "spiral": _spiral,
    "cells": _cells,
    "strokes": _strokes,
    "saddles": _saddles,
    "waves": _waves,
}
# Even untrained features tell these families from the normal ones, so that one sees a detector work.
ANOMALOUS: dict[str, Motif] = {"stripes": _stripes, "dots": _dots, "zigzag": _zigzag}
