"""Attacked examples and the training sets of shadow models: positions in a list of training images."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from lit_fedad.contracts.randomness import numpy_generator
from lit_fedad.data.sample import grouped


class Cell(NamedTuple):
    """Attacked examples of one class in the same stages of a client, half of which each shadow model is trained on.

    Attributes:
        client: Number of the client.
        stages: Numbers of its stages that hold them; only the first, where all images are there from the start.
        examples: Positions of the examples.
    """

    client: int
    stages: tuple[int, ...]
    examples: tuple[int, ...]


def draw_cells(
    stages: Sequence[Sequence[Sequence[int]]], categories: Sequence[str], share: float, seed: int
) -> list[Cell]:
    """Draws the attacked examples among the clients' own images, half of which every shadow model leaves out.

    All examples are then of one distribution, and shadow models are trained on fewer images than the run was.

    Args:
        stages: For every client the positions of its images, stage by stage.
        categories: Class of the image at each position.
        share: Share of a client's images of a class that become examples, in (0, 1].
        seed: Seed of the draws.
    """
    images_of = grouped(
        ((categories[index], client, holding_stages), index)
        for index, client, holding_stages in _held(stages)
    )
    cells = []
    for (category, client, holding_stages), images in images_of.items():
        rng = numpy_generator(seed, "membership", category, client, *holding_stages)
        half = max(1, round(share * len(images)) // 2)
        if len(images) >= 2:
            drawn = rng.permutation(images)[: 2 * half].tolist()
            cells.append(Cell(client, holding_stages, (*sorted(drawn[:half]), *sorted(drawn[half:]))))
    return sorted(cells)


def _held(stages: Sequence[Sequence[Sequence[int]]]) -> Iterator[tuple[int, int, tuple[int, ...]]]:
    """Yields each position that a client holds, the client, and the numbers of its stages that hold it."""
    for client, client_stages in enumerate(stages):
        holding = [set(stage) for stage in client_stages]
        for index in sorted(set().union(*holding)):
            yield index, client, tuple(number for number, stage in enumerate(holding) if index in stage)


def split(cells: Sequence[Cell], shadow: int, seed: int) -> set[int]:
    """Draws the examples that a shadow model is trained on: a random half of each cell.

    Shadow models 0 and 1, 2 and 3 and so on are trained on the two halves of the same draw. So each example is in
    half of an even number of shadow models, and every client has as many images of each class as it really has.

    Args:
        cells: From `draw_cells`.
        shadow: Number of the shadow model, from 0.
        seed: Seed of the draws.
    """
    chosen: set[int] = set()
    for number, cell in enumerate(cells):
        order = numpy_generator(seed, "shadow", shadow // 2, number).permutation(cell.examples)
        chosen.update(np.array_split(order, 2)[shadow % 2].tolist())
    return chosen


def trained_on(
    stages: Sequence[Sequence[Sequence[int]]], cells: Sequence[Cell], chosen: set[int]
) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Builds the stages of each client where, of the examples, only the chosen ones are trained on.

    Args:
        stages: For every client the positions of its images, stage by stage.
        cells: From `draw_cells`.
        chosen: From `split`.

    Returns:
        As ``stages``, ascending; images that are no examples stay.
    """
    left_out = {index for cell in cells for index in cell.examples} - chosen
    return tuple(
        tuple(tuple(sorted(set(stage) - left_out)) for stage in client_stages) for client_stages in stages
    )
