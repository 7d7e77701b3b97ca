"""The sheet of condensed images of a run, by class and round."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import cast

import numpy as np
from matplotlib.figure import Figure

from lit_fedad.experiment.run import Run, RunCallback
from lit_fedad.methods.parts.condensed_server import CondensedServer
from lit_fedad.report.figures import save_figure
from lit_fedad.report.style import FONT_SIZE, as_written, blank_figure


class CondensedImages(RunCallback):
    """A callback that draws condensed images after the last round, unless ``evaluation.pictures`` is 0."""

    def on_rounds_end(self, run: Run) -> None:
        """Draws ``knowledge.png``; nothing where no images were sent."""
        if not run.fabric.is_global_zero or not run.config["evaluation"]["pictures"]:
            return
        shared = cast("CondensedServer", run.federation.server).images_by_round()
        if shared:
            images = {round: (own.numpy(), labels.numpy()) for round, (own, labels) in shared.items()}
            figure = knowledge_sheet(images, run.local.images.categories)
            save_figure(figure, run.folder.path / "figures" / "knowledge.png")


_MOST_ROUNDS, _MOST_CLASSES = 8, 20
_ACROSS = 12  # images side by side, of all rounds together
_SIDE = 0.5  # inches of an image's longer side
_NAME = 22  # letters in a line
_EMPTY = 0.93  # grey where a class has no image


def knowledge_sheet(shared: Mapping[int, tuple[np.ndarray, np.ndarray]], classes: Sequence[str]) -> Figure:
    """Draws one row a class and one column a round, with a few images in each cell, evenly spaced over the clients.

    Up to 8 rounds and 20 classes are shown, evenly spaced, the first and the last among them. Cells without an
    image are pale.

    Args:
        shared: Images uint8 of 1 or 3 channels [n, C, H, W] and labels [n] of each round, by its number; at least
            one round.
        classes: Names of the classes.
    """
    rounds = [sorted(shared)[i] for i in evenly(len(shared), _MOST_ROUNDS)]
    labels = evenly(len(classes), _MOST_CLASSES)
    each = int(np.clip(_ACROSS // len(rounds), 1, 4))
    tall, side = shared[rounds[0]][0].shape[-2:]
    gap = max(1, side // 14)
    strips = [[_strip(*shared[round], label, each, gap) for round in rounds] for label in labels]
    wide, high = each * (side + gap) + 2 * gap, tall + gap  # of a cell; rounds are three gaps apart
    sheet = np.ones((len(labels) * high - gap, len(rounds) * wide - 3 * gap, 3))
    for row, strip_row in enumerate(strips):
        for column, strip in enumerate(strip_row):
            sheet[row * high : row * high + tall, column * wide : column * wide + strip.shape[1]] = strip

    names = [as_written(textwrap.fill(classes[label], _NAME)) for label in labels]
    inches = np.array(sheet.shape[:2]) / max(tall, side) * _SIDE
    letters = max(len(line) for name in names for line in name.splitlines())
    figure = blank_figure(inches[1] + 0.3 + FONT_SIZE * 0.62 * letters / 72, inches[0] + 0.35)
    axes = figure.add_subplot()
    axes.imshow(sheet)
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0, labelsize=FONT_SIZE, labeltop=True, labelbottom=False, pad=3)
    axes.set_yticks([row * high + tall / 2 - 0.5 for row in range(len(labels))], names)
    middles = [column * wide + (wide - 3 * gap) / 2 - 0.5 for column in range(len(rounds))]
    axes.set_xticks(middles, [f"round {round}" for round in rounds])
    figure.draw_without_rendering()  # one pass of the layout is only near: long names would be cut
    return figure


def evenly(count: int, most: int) -> list[int]:
    """Chooses evenly spaced numbers below ``count``, the first and the last among them.

    Example:
        >>> evenly(3, 8), evenly(100, 5)
        ([0, 1, 2], [0, 25, 50, 74, 99])
    """
    return np.linspace(0, count - 1, min(count, most)).round().astype(int).tolist()


def _strip(images: np.ndarray, labels: np.ndarray, label: int, each: int, gap: int) -> np.ndarray:
    """Places images of a class side by side, with three channels."""
    tall, side = images.shape[-2:]
    strip = np.ones((tall, each * (side + gap) - gap, 3))
    own = images[labels == label]
    places = range(0, strip.shape[1], side + gap)
    for place, image in zip(places, own[evenly(len(own), each)], strict=False):
        strip[:, place : place + side] = image.transpose(1, 2, 0) / 255
    for place in places[len(own) :]:
        strip[:, place : place + side] = _EMPTY
    return strip
