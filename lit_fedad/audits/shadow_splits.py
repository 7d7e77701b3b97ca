"""Attacked examples and the training sets of shadow models: positions in a list of training and held-out images."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from lit_fedad.contracts.randomness import numpy_generator
from lit_fedad.data.sample import grouped


@dataclass(frozen=True)
class Cell:
    """Members of one class in the same stages of a client, and as many non-members of that class.

    Attributes:
        client: Number of the client.
        stages: Numbers of its stages that hold the members; only the first, where all images are there from the start.
        members: Positions of the members that are attacked, ascending.
        others: Positions of the non-members, ascending.
    """

    client: int
    stages: tuple[int, ...]
    members: tuple[int, ...]
    others: tuple[int, ...]

    @property
    def pool(self) -> tuple[int, ...]:
        """All examples, members first."""
        return self.members + self.others


def draw_cells(
    stages: Sequence[Sequence[Sequence[int]]], categories: Sequence[str], held_out: Sequence[int], seed: int
) -> list[Cell]:
    """Draws the attacked examples: every member with a held-out image of its class, and these images.

    No image is held out for two clients. Where a class has too few, they are dealt in turn, and random members of
    it are attacked, as many as there are images.

    Args:
        stages: For every client the positions of its images, stage by stage.
        categories: Class of the image at each position.
        held_out: Positions of images that no client holds.
        seed: Seed of the draws.

    Example:
        >>> draw_cells([[[0, 1]], [[2]]], ["cat"] * 5, held_out=[3, 4], seed=0)[1]
        Cell(client=1, stages=(0,), members=(2,), others=(...,))
    """
    holders_of: dict[str, dict[tuple[int, tuple[int, ...]], list[int]]] = {}
    for index, client, stages_of in _held(stages):
        holders_of.setdefault(categories[index], {}).setdefault((client, stages_of), []).append(index)
    cells = []
    for category, holders in holders_of.items():
        rng = numpy_generator(seed, "membership", category)
        spare = rng.permutation([index for index in held_out if categories[index] == category]).tolist()
        longest = max(map(len, holders.values()))
        turns = [at for turn in range(longest) for at, members in holders.items() if turn < len(members)]
        dealt = list(zip(turns, spare, strict=False))  # ends with the shorter of the two
        for where, members in holders.items():
            others = [index for taker, index in dealt if taker == where]
            attacked = rng.permutation(members)[: len(others)].tolist()
            if others:
                cells.append(Cell(*where, tuple(sorted(attacked)), tuple(sorted(others))))
    return sorted(cells, key=lambda cell: (cell.client, cell.stages, cell.members))


def draw_training_cells(
    stages: Sequence[Sequence[Sequence[int]]], categories: Sequence[str], share: float, seed: int
) -> list[Cell]:
    """Draws the attacked examples among the clients' own images, half of which every shadow model leaves out.

    All examples are then of one distribution, and shadow models are trained on fewer images than the run was.

    Args:
        stages: As in `draw_cells`.
        categories: As in `draw_cells`.
        share: Share of a client's images of a class that become examples, in (0, 1].
        seed: Seed of the draws.
    """
    images_of = grouped(((categories[index], client, where), index) for index, client, where in _held(stages))
    cells = []
    for (category, client, where), images in images_of.items():
        rng = numpy_generator(seed, "membership", category, client, *where)
        half = max(1, round(share * len(images)) // 2)
        if len(images) >= 2:
            drawn = rng.permutation(images)[: 2 * half].tolist()
            cells.append(Cell(client, where, tuple(sorted(drawn[:half])), tuple(sorted(drawn[half:]))))
    return sorted(cells, key=lambda cell: (cell.client, cell.stages, cell.members))


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
        order = numpy_generator(seed, "shadow", shadow // 2, number).permutation(cell.pool)
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
        As ``stages``, ascending; members that are not attacked stay.
    """
    out = {index for cell in cells for index in cell.pool} - chosen
    remaining = [[set(stage) - out for stage in client_stages] for client_stages in stages]
    for cell in cells:
        for stage in cell.stages:
            remaining[cell.client][stage].update(chosen.intersection(cell.others))
    return tuple(tuple(tuple(sorted(stage)) for stage in client_stages) for client_stages in remaining)
