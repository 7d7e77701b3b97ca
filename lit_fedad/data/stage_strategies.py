"""Partition strategies whose images arrive in stages, one set after another, as in continual learning."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from lit_fedad.contracts.randomness import numpy_generator
from lit_fedad.core.bounds import at_least, within
from lit_fedad.core.errors import UserError
from lit_fedad.data.labelled import Images
from lit_fedad.data.partition import Partition, Schedule, indices_by_category
from lit_fedad.data.subset import require_known


def long_tail(sizes: Sequence[int], imbalance: float) -> list[int]:
    """Computes how many images each class keeps under an exponential profile.

    n_c = n_max (1 / IF)^(c / (C - 1)), rounded down, and never more than class c has. This is the profile of LDAM
    (Cao et al., "Learning Imbalanced Datasets with Label-Distribution-Aware Margin Loss", NeurIPS 2019), which
    GLDP's experiments use.

    Args:
        sizes: Images of the C classes, from head to tail; n_max is the largest.
        imbalance: Imbalance factor IF, the ratio of the first class to the last; 1 keeps every image.

    Raises:
        UserError: ``imbalance`` is below 1, or a class would be left empty.

    Example:
        >>> long_tail([5000] * 10, imbalance=100)
        [5000, 2997, 1796, 1077, 645, 387, 232, 139, 83, 50]
    """
    at_least("partition", 1, imbalance=imbalance)
    largest = max(sizes)
    last = max(len(sizes) - 1, 1)
    sizes_left = []
    for number, size in enumerate(sizes):
        # Rounding errors must not take an image where the profile is a whole number, as 960 / 32^(4/5) = 60.
        sizes_left.append(min(size, math.floor(largest / imbalance ** (number / last) + 1e-9)))
        if not sizes_left[-1]:
            remedy = f"lower imbalance to at most {largest}" if size else "give it some or leave it out"
            raise UserError(
                f"partition.imbalance={imbalance}: class {number} of size {size} is left without images; {remedy}"
            )
    return sizes_left


Shards = Literal["of_class", "equal"]


@dataclass(frozen=True)
class LongTailedStages:
    """Long-tailed classes in [N, S, M]: N clients with S classes in each of M stages (GLDP, experiments).

    Of each class, random images are set aside for the server, and the others are cut to a long tail in the order
    of the classes. In every stage S distinct classes are assigned to each client, as evenly as possible; a client may
    meet a class again in a later stage. A class's images are split into as many equal shards as stages hold it, so
    no image is given twice. A class with fewer images than shards is missing from some of these stages, and one
    that was assigned to no client is held by none.

    With equal shards the long-tailed images, in the order of their classes, are cut into shards of one size, of which
    every stage is given S at random (McMahan et al., AISTATS 2017): all stages have the same number of images, mostly
    of fewer than S classes. Images that fill no shard, chosen at random, are held by none.

    Attributes:
        clients: Number of clients N.
        classes: Classes of each stage S.
        stages: Stages of a client M.
        imbalance: Imbalance factor of the long tail, see `long_tail`; 1 for none.
        min_stages: Each client's number of stages is drawn uniformly from this to ``stages``; None gives all of
            them ``stages``.
        shards: What each stage gets: ``"of_class"``, parts of S classes; ``"equal"``, S shards of equal size.
        equal_size: Whether every stage is cut, at random, to the size of the smallest stage.
        server_labelled: Images of each class that the server keeps.
        schedule: When the stages come, as in `StreamDataModule`.

    Raises:
        UserError: A number is out of range, there are fewer classes than a stage needs, or a class or a stage is
            left without images.
    """

    clients: int = 20
    classes: int = 4
    stages: int = 5
    imbalance: float = 50
    min_stages: int | None = None
    shards: Shards = "of_class"
    equal_size: bool = False
    server_labelled: int = 0
    schedule: Schedule = "stage_major"

    def __post_init__(self) -> None:
        at_least("partition", 1, clients=self.clients, classes=self.classes, stages=self.stages)
        at_least("partition", 0, server_labelled=self.server_labelled)
        within("partition", 1, self.stages, min_stages=self.min_stages)

    def __call__(self, image_set: Images, seed: int) -> Partition:
        """Draws the server's images, the long tail, and the classes and shards of each stage from ``seed``.

        The server's images and those that a long tail keeps do not depend on clients, classes and stages.
        """
        rng = numpy_generator(seed, "partition")
        piles = {name: rng.permutation(images) for name, images in _in_order(image_set).items()}
        self._check_classes({name: len(pile) for name, pile in piles.items()}, image_set.name)
        reserved = np.concatenate([pile[: self.server_labelled] for pile in piles.values()])
        others = [pile[self.server_labelled :] for pile in piles.values()]
        sizes = long_tail([len(pile) for pile in others], self.imbalance)
        tail = [pile[:size] for pile, size in zip(others, sizes, strict=True)]
        stages = self._shares(tail, rng) if self.shards == "of_class" else self._equal_shards(tail, rng)
        smallest = self._smallest(stages)
        if self.equal_size:
            stages = [[rng.permutation(part)[:smallest].tolist() for part in client] for client in stages]
        return Partition.in_stages(stages, reserved, self.schedule)

    def _shares(self, piles: Sequence[np.ndarray], rng: np.random.Generator) -> list[list[list[int]]]:
        """Assigns classes to the clients stage by stage, then each class's images to the stages that hold it."""
        stages: list[list[list[int]]] = [[[] for _ in range(length)] for length in self._lengths(rng)]
        holders: list[list[list[int]]] = [[] for _ in piles]
        for number in range(self.stages):
            present = [client_stages[number] for client_stages in stages if number < len(client_stages)]
            assigned = _assign(len(present), self.classes, len(piles), rng)
            for stage, classes in zip(present, assigned, strict=True):
                for label in classes:
                    holders[label].append(stage)
        for pile, holding in zip(piles, holders, strict=True):
            if not holding:
                continue
            # In random order, because array_split puts larger shards first and, of few images, empty ones last.
            order = rng.permutation(len(holding))
            for position, shard in zip(order, np.array_split(pile, len(holding)), strict=True):
                holding[position].extend(shard.tolist())
        return stages

    def _equal_shards(self, piles: Sequence[np.ndarray], rng: np.random.Generator) -> list[list[list[int]]]:
        """Cuts the images, in the order of their classes, into shards of one size, and deals S to every stage."""
        lengths = self._lengths(rng)
        pool, number = np.concatenate(piles), self.classes * sum(lengths)
        chosen = np.sort(rng.permutation(len(pool))[: len(pool) // number * number])
        dealt = iter(rng.permutation(pool[chosen].reshape(number, -1)).reshape(sum(lengths), -1).tolist())
        return [[next(dealt) for _ in range(length)] for length in lengths]

    def _lengths(self, rng: np.random.Generator) -> list[int]:
        """Draws the number of stages of every client."""
        fewest = self.stages if self.min_stages is None else self.min_stages
        return rng.integers(fewest, self.stages, size=self.clients, endpoint=True).tolist()

    def _check_classes(self, sizes: Mapping[str, int], name: str) -> None:
        if self.classes > len(sizes):
            raise UserError(
                f"partition.classes={self.classes}: {name} has {len(sizes)} classes; lower classes to that"
            )
        for category, size in sizes.items():
            if 0 < size <= self.server_labelled:
                raise UserError(
                    f"partition.server_labelled={self.server_labelled} leaves none of the {size} images of class"
                    f" '{category}'; lower it below {size}"
                )

    def _smallest(self, stages: Sequence[Sequence[Sequence[int]]]) -> int:
        """Returns the size of the smallest stage, which must not be empty."""
        size, client, stage = min(
            (len(s), i, m) for i, client_stages in enumerate(stages) for m, s in enumerate(client_stages)
        )
        if not size:
            raise UserError(
                f"partition: stage {stage} of client {client} is left without an image, for its classes have fewer"
                " images than stages; lower partition.clients, stages or imbalance"
            )
        return size


@dataclass(frozen=True)
class ProductsInTurn:
    """Stages that each bring one new category (product type, or class), of which every client holds an even share.

    Attributes:
        clients: Number of clients.
        order: Categories in the order of the stages; one that is left out belongs to no client. None takes all in
            the order of the set.
        rotate: Whether client i starts with category i and goes round, so that at any time clients see different
            categories.
        schedule: When the stages come, as in `StreamDataModule`.

    Raises:
        UserError: A category is unknown, named twice or has fewer images than there are clients, or none is named.
    """

    clients: int = 3
    order: Sequence[str] | None = None
    rotate: bool = False
    schedule: Schedule = "stage_major"

    def __post_init__(self) -> None:
        at_least("partition", 1, clients=self.clients)

    def __call__(self, image_set: Images, seed: int) -> Partition:
        """Shuffles the images of every category with ``seed`` and cuts them into even parts."""
        rng = numpy_generator(seed, "partition")
        by_category = _in_order(image_set)
        order = self._order(by_category)
        shards = [np.array_split(rng.permutation(by_category[category]), self.clients) for category in order]
        number = len(order)
        stages = [
            [shards[(stage + client * self.rotate) % number][client].tolist() for stage in range(number)]
            for client in range(self.clients)
        ]
        return Partition.in_stages(stages, schedule=self.schedule)

    def _order(self, by_category: Mapping[str, Sequence[int]]) -> Sequence[str]:
        order = list(by_category) if self.order is None else self.order
        if not order:
            raise UserError("partition.order=[]: name at least one category, or give null for all")
        for position, category in enumerate(order):
            require_known(category, by_category, f"partition.order: no category '{category}'")
            if category in order[:position]:
                raise UserError(f"partition.order: category '{category}' is named twice; remove one")
            if len(by_category[category]) < self.clients:
                raise UserError(
                    f"partition: {self.clients} clients but {len(by_category[category])} training images of category"
                    f" '{category}'; lower partition.clients, or leave it out of partition.order"
                )
        return order


def _assign(draws: int, size: int, classes: int, rng: np.random.Generator) -> list[np.ndarray]:
    """Draws sets of distinct classes; over all sets, any two classes are drawn equally often, give or take one."""
    sets = []
    remaining = np.empty(0, dtype=np.int64)
    for _ in range(draws):
        drawn, remaining = remaining[:size], remaining[size:]
        if len(drawn) < size:
            new_order = rng.permutation(classes)
            missing = new_order[~np.isin(new_order, drawn)][: size - len(drawn)]
            drawn, remaining = np.concatenate([drawn, missing]), new_order[~np.isin(new_order, missing)]
        sets.append(drawn)
    return sets


def _in_order(image_set: Images) -> dict[str, list[int]]:
    """Lists the training indices of every category, in the order of ``image_set.categories``."""
    by_category = indices_by_category(image_set)
    return {category: by_category.get(category, []) for category in image_set.categories}
