"""Partitions whose images arrive task after task."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from lit_fedad.contracts.randomness import numpy_generator
from lit_fedad.data.labelled import Images
from lit_fedad.data.long_tail import long_tail
from lit_fedad.data.partition import Partition, Schedule, indices_by_product
from lit_fedad.errors import UserError


@dataclass(frozen=True)
class TaskStream:
    """Long-tailed classes in [N, S, M]: N clients with S classes in each of M tasks (GLDP, experiments).

    Of each class, random images are set aside for the server, and the others are cut to a long tail in the order
    of the classes. In every stage S distinct classes are dealt to each client, as evenly as possible; a client may
    meet a class again in a later stage. A class's images are split into as many equal shards as hands hold it, so
    no image is given twice. A class with fewer images than shards is missing from some of the hands, and one
    that was dealt to nobody is held by nobody.

    Attributes:
        clients: Number of clients N.
        classes: Classes of each task S.
        stages: Tasks of a client M.
        imbalance: Imbalance factor of the long tail, see `long_tail`; 1 for none.
        min_stages: Each client's number of tasks is drawn uniformly from this to ``stages``; None gives all of
            them ``stages``.
        equal_size: Whether every task is cut, at random, to the size of the smallest.
        teaching: Images of each class that the server keeps.
        schedule: When the stages come, as in `StreamDataModule`.

    Raises:
        UserError: A number is out of range, there are fewer classes than a task needs, or a class or a stage is
            left without images.
    """

    clients: int = 20
    classes: int = 4
    stages: int = 5
    imbalance: float = 50
    min_stages: int | None = None
    equal_size: bool = False
    teaching: int = 0
    schedule: Schedule = "stage_major"

    def __post_init__(self) -> None:
        if min(self.clients, self.classes, self.stages) < 1 or self.teaching < 0:
            raise UserError(
                f"partition clients={self.clients}, classes={self.classes}, stages={self.stages},"
                f" teaching={self.teaching}: give at least 1, and for teaching at least 0"
            )
        if self.min_stages is not None and not 1 <= self.min_stages <= self.stages:
            raise UserError(
                f"partition min_stages={self.min_stages}: give 1 to {self.stages} (stages), or null for all stages"
            )

    def __call__(self, image_set: Images, seed: int) -> Partition:
        """Draws teaching set, long tail, hands and shards from ``seed``.

        The teaching set and the images that a long tail keeps do not depend on clients, classes and stages.
        """
        rng = numpy_generator(seed, "partition")
        piles = {name: rng.permutation(own) for name, own in _in_order(image_set).items()}
        self._check_classes({name: len(pile) for name, pile in piles.items()}, image_set.name)
        reserved = np.concatenate([pile[: self.teaching] for pile in piles.values()])
        left = [pile[self.teaching :] for pile in piles.values()]
        kept = long_tail([len(pile) for pile in left], self.imbalance)
        tasks = self._shares([pile[:size] for pile, size in zip(left, kept, strict=True)], rng)
        smallest = self._smallest(tasks)
        if self.equal_size:
            tasks = [[rng.permutation(task)[:smallest].tolist() for task in own] for own in tasks]
        return Partition.in_stages(tasks, reserved, self.schedule)

    def _shares(self, piles: Sequence[np.ndarray], rng: np.random.Generator) -> list[list[list[int]]]:
        """Deals classes to the clients stage by stage, then each class's images to the tasks that hold it."""
        fewest = self.stages if self.min_stages is None else self.min_stages
        lengths = rng.integers(fewest, self.stages, size=self.clients, endpoint=True)
        tasks: list[list[list[int]]] = [[[] for _ in range(length)] for length in lengths]
        holders: list[list[list[int]]] = [[] for _ in piles]
        for stage in range(self.stages):
            present = [own[stage] for own in tasks if stage < len(own)]
            for task, hand in zip(present, _deal(len(present), self.classes, len(piles), rng), strict=True):
                for number in hand:
                    holders[number].append(task)
        for pile, holding in zip(piles, holders, strict=True):
            if not holding:
                continue
            # In random order, for the larger shards come first and those of a short class are empty at the end.
            order = rng.permutation(len(holding))
            for number, shard in zip(order, np.array_split(pile, len(holding)), strict=True):
                holding[number].extend(shard.tolist())
        return tasks

    def _check_classes(self, sizes: Mapping[str, int], name: str) -> None:
        if self.classes > len(sizes):
            raise UserError(
                f"partition classes={self.classes}: {name} has {len(sizes)} classes; lower classes to that"
            )
        for product, size in sizes.items():
            if 0 < size <= self.teaching:
                raise UserError(
                    f"partition teaching={self.teaching} leaves none of the {size} images of class '{product}';"
                    f" lower it below {size}"
                )

    def _smallest(self, tasks: Sequence[Sequence[Sequence[int]]]) -> int:
        """The size of the smallest task, which is not empty."""
        size, client, stage = min((len(t), i, m) for i, own in enumerate(tasks) for m, t in enumerate(own))
        if not size:
            raise UserError(
                f"partition: stage {stage} of client {client} is left without an image, for its classes have fewer"
                " images than tasks; lower clients, stages or imbalance"
            )
        return size


@dataclass(frozen=True)
class ProductsInTurn:
    """Each task brings a new product type, of which every client holds an even share.

    Attributes:
        clients: Number of clients.
        order: Product types in the order in which they come; one that is left out is held by nobody. None takes
            all in the order of the set.
        rotate: Whether client i starts with type i and goes round, so that at any time clients see different
            types.
        schedule: When the stages come, as in `StreamDataModule`.

    Raises:
        UserError: A product is unknown, named twice or has fewer images than there are clients, or none is named.
    """

    clients: int = 3
    order: Sequence[str] | None = None
    rotate: bool = False
    schedule: Schedule = "stage_major"

    def __post_init__(self) -> None:
        if self.clients < 1:
            raise UserError(f"partition clients={self.clients}: give at least 1")

    def __call__(self, image_set: Images, seed: int) -> Partition:
        """Shuffles the images of every product type with ``seed`` and cuts them into even parts."""
        rng = numpy_generator(seed, "partition")
        by_product = _in_order(image_set)
        order = self._order(by_product)
        shards = [np.array_split(rng.permutation(by_product[product]), self.clients) for product in order]
        stages = [
            [
                shards[(stage + client * self.rotate) % len(order)][client].tolist()
                for stage in range(len(order))
            ]
            for client in range(self.clients)
        ]
        return Partition.in_stages(stages, schedule=self.schedule)

    def _order(self, by_product: Mapping[str, Sequence[int]]) -> Sequence[str]:
        order = list(by_product) if self.order is None else self.order
        if not order:
            raise UserError("partition order=[]: name at least one product, or give null for all")
        for position, product in enumerate(order):
            if product not in by_product:
                raise UserError(
                    f"partition order: no product '{product}'; the known ones are {', '.join(by_product)}"
                )
            if product in order[:position]:
                raise UserError(f"partition order: product '{product}' is named twice; remove one")
            if len(by_product[product]) < self.clients:
                raise UserError(
                    f"partition: {self.clients} clients but {len(by_product[product])} training images of product"
                    f" '{product}'; lower clients, or leave it out of order"
                )
        return order


def _deal(hands: int, size: int, classes: int, rng: np.random.Generator) -> list[np.ndarray]:
    """Deals hands of distinct classes; over all hands, numbers of a class differ by at most one."""
    dealt = []
    deck = np.empty(0, dtype=np.int64)
    for _ in range(hands):
        hand, deck = deck[:size], deck[size:]
        if len(hand) < size:
            fresh = rng.permutation(classes)
            more = fresh[~np.isin(fresh, hand)][: size - len(hand)]
            hand, deck = np.concatenate([hand, more]), fresh[~np.isin(fresh, more)]
        dealt.append(hand)
    return dealt


def _in_order(image_set: Images) -> dict[str, list[int]]:
    """The training indices of every product type, in the order of ``image_set.products``."""
    held = indices_by_product(image_set)
    return {product: held.get(product, []) for product in image_set.products}
