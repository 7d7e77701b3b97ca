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
        """Draws ``knowledge.png``, unless clients sent no images."""
        if not run.fabric.is_global_zero or not run.config["evaluation"]["pictures"]:
            return
        shared = cast("CondensedServer", run.federation.server).images_by_round()
        if shared:
            images = {round: (pixels.numpy(), labels.numpy()) for round, (pixels, labels) in shared.items()}
            figure = knowledge_sheet(images, run.local.images.categories)
            save_figure(figure, run.folder.path / "figures" / "knowledge.png")


_MAX_ROUNDS, _MAX_CLASSES = 8, 20
_IMAGES_PER_ROW = 12  # of all rounds together
_SIDE_INCHES = 0.5  # length of an image's longer side
_NAME_WIDTH = 22  # letters in a line of a class's name
_EMPTY_GREY = 0.93  # shown where a class has no image


def knowledge_sheet(shared: Mapping[int, tuple[np.ndarray, np.ndarray]], classes: Sequence[str]) -> Figure:
    """Draws a row for each class and a column for each round; a cell holds a few images, evenly spaced over clients.

    Up to 8 rounds and 20 classes are shown, evenly spaced, with the first and the last. Cells without an image are
    pale.

    Args:
        shared: Images uint8 of 1 or 3 channels [n, C, H, W] and labels [n], by round; at least one round.
        classes: Names of the classes.
    """
    rounds = [sorted(shared)[i] for i in evenly(len(shared), _MAX_ROUNDS)]
    labels = evenly(len(classes), _MAX_CLASSES)
    per_cell = int(np.clip(_IMAGES_PER_ROW // len(rounds), 1, 4))
    image_height, side = shared[rounds[0]][0].shape[-2:]
    gap = max(1, side // 14)
    strips = [[_strip(*shared[round], label, per_cell, gap) for round in rounds] for label in labels]
    # Pixels of a cell with the gaps after it; rounds are three gaps apart.
    cell_width, cell_height = per_cell * (side + gap) + 2 * gap, image_height + gap
    sheet = np.ones((len(labels) * cell_height - gap, len(rounds) * cell_width - 3 * gap, 3))
    for row, strip_row in enumerate(strips):
        for column, strip in enumerate(strip_row):
            top, left = row * cell_height, column * cell_width
            sheet[top : top + image_height, left : left + strip.shape[1]] = strip

    names = [as_written(textwrap.fill(classes[label], _NAME_WIDTH)) for label in labels]
    inches = np.array(sheet.shape[:2]) / max(image_height, side) * _SIDE_INCHES
    letters = max(len(line) for name in names for line in name.splitlines())
    figure = blank_figure(inches[1] + 0.3 + FONT_SIZE * 0.62 * letters / 72, inches[0] + 0.35)
    axes = figure.add_subplot()
    axes.imshow(sheet)
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0, labelsize=FONT_SIZE, labeltop=True, labelbottom=False, pad=3)
    axes.set_yticks([row * cell_height + image_height / 2 - 0.5 for row in range(len(labels))], names)
    middles = [column * cell_width + (cell_width - 3 * gap) / 2 - 0.5 for column in range(len(rounds))]
    axes.set_xticks(middles, [f"round {round}" for round in rounds])
    figure.draw_without_rendering()  # a second pass of the layout: after one pass, long names would be cut
    return figure


def evenly(count: int, most: int) -> list[int]:
    """Chooses at most ``most`` evenly spaced numbers below ``count``, with the first and the last.

    Example:
        >>> evenly(3, 8), evenly(100, 5)
        ([0, 1, 2], [0, 25, 50, 74, 99])
    """
    return np.linspace(0, count - 1, min(count, most)).round().astype(int).tolist()


def _strip(images: np.ndarray, labels: np.ndarray, label: int, per_cell: int, gap: int) -> np.ndarray:
    """Places at most `per_cell` images of a class side by side, with three channels; missing images are grey."""
    image_height, side = images.shape[-2:]
    strip = np.ones((image_height, per_cell * (side + gap) - gap, 3))
    class_images = images[labels == label]
    lefts = range(0, strip.shape[1], side + gap)
    for left, image in zip(lefts, class_images[evenly(len(class_images), per_cell)], strict=False):
        strip[:, left : left + side] = image.transpose(1, 2, 0) / 255
    for left in lefts[len(class_images) :]:
        strip[:, left : left + side] = _EMPTY_GREY
    return strip
