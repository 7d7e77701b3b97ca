"""Partition strategies for clients that hold all their images from the start.

A strategy is called with the image set and a seed, and returns a `Partition`.
"""

from dataclasses import dataclass
from itertools import chain

import numpy as np

from lit_fedad.contracts.randomness import numpy_generator
from lit_fedad.core.bounds import above, at_least, within
from lit_fedad.core.errors import UserError
from lit_fedad.data.hold_out import image_groups
from lit_fedad.data.labelled import Images
from lit_fedad.data.partition import Partition, indices_by_category
from lit_fedad.data.sample import grouped

_MAX_DRAWS = 10_000


@dataclass(frozen=True)
class Dirichlet:
    """Label-skewed clients: each category is split by its own draw from Dir(alpha).

    For every category p, q_p ~ Dirichlet(alpha * 1_N) gives the shares of the N clients (FedDyMem, experiments).
    All categories are drawn anew until every client is large enough.

    Attributes:
        clients: Number of clients N.
        alpha: Concentration; small values leave each category with few clients.
        min_size: Fewest images a client may hold.
        balance: Whether clients that already hold their even share of all images get nothing of the categories
            that follow, as in PFLlib; sizes become more alike.

    Raises:
        UserError: A number is out of range, or ``min_size`` was not reached in 10,000 draws.
    """

    clients: int = 5
    alpha: float = 0.1
    min_size: int = 10
    balance: bool = False

    def __post_init__(self) -> None:
        at_least("partition", 1, clients=self.clients)
        above("partition", 0, alpha=self.alpha)
        at_least("partition", 0, min_size=self.min_size)

    def __call__(self, image_set: Images, seed: int) -> Partition:
        """Splits every category of the training images by shares drawn from ``seed``."""
        rng = numpy_generator(seed, "partition")
        piles = [rng.permutation(indices) for indices in indices_by_category(image_set).values()]
        totals = np.array([len(indices) for indices in piles])
        possible = self.clients * self.min_size <= totals.sum()
        for _ in range(_MAX_DRAWS if possible else 0):
            counts = self._draw_counts(rng, totals)
            if counts.sum(axis=0).min() >= self.min_size:
                break
        else:
            raise UserError(
                f"partition: no draw with alpha={self.alpha} gave each of {self.clients} clients"
                f" min_size={self.min_size} of the {totals.sum()} images; lower them, or deal evenly:"
                f" {even_split(int(totals.sum()), self.clients)}"
            )
        pieces = [np.split(indices, np.cumsum(row)[:-1]) for indices, row in zip(piles, counts, strict=True)]
        return Partition.of_clients(np.concatenate(parts) for parts in zip(*pieces, strict=True))

    def _draw_counts(self, rng: np.random.Generator, totals: np.ndarray) -> np.ndarray:
        """Draws how many images of every category each client gets, int64 [categories, clients]."""
        counts = np.zeros((len(totals), self.clients), dtype=np.int64)
        for row, total in zip(counts, totals, strict=True):
            shares = rng.dirichlet(np.full(self.clients, self.alpha))
            if self.balance:
                unfilled = counts.sum(axis=0) < totals.sum() / self.clients
                shares = shares * unfilled
                # With a tiny alpha, all shares may fall to clients that are full already.
                shares = shares / shares.sum() if shares.sum() > 0 else unfilled / unfilled.sum()
            edges = np.rint(np.cumsum(shares)[:-1] * total).clip(max=total)
            row[:] = np.diff(edges, prepend=0, append=total)
        return counts


@dataclass(frozen=True)
class DominantClass:
    """Equally large clients, each with one dominant class and a few contaminants (FADngs, experimental setup).

    Client c holds round(contamination * size) contaminants, round(dominant * the rest) images of normal class c
    modulo their number, and random ones of the other normal classes: 10 + 891 + 99 by default. Halves are rounded
    to even. No client shares an image with another, and the images left over belong to none.

    Attributes:
        clients: Number of clients.
        size: Images of each client.
        dominant: Share of the dominant class among a client's normal images.
        contamination: Share of contaminants, the training images of a `SemanticSet`'s anomaly sets, among a
            client's images; 0 for any other set.

    Raises:
        UserError: A number is out of range, or there are too few images.
    """

    clients: int = 10
    size: int = 1000
    dominant: float = 0.9
    contamination: float = 0.01

    def __post_init__(self) -> None:
        at_least("partition", 1, clients=self.clients, size=self.size)
        within("partition", 0, 1, dominant=self.dominant, contamination=self.contamination)
        if self.contamination == 1:
            raise UserError("partition.contamination=1 must be below 1: a client needs normal images")

    def __call__(self, image_set: Images, seed: int) -> Partition:
        """Draws every client's images with ``seed``: dominant ones first, then the others, client by client."""
        rng = numpy_generator(seed, "partition")
        contaminants = round(self.contamination * self.size)
        dominant = round(self.dominant * (self.size - contaminants))
        others = self.size - contaminants - dominant
        classes = image_set.normal_categories
        column = {category: number for number, category in enumerate(classes)}
        # Contaminants have no number among the normal classes.
        number = np.array([column.get(sample.category, -1) for sample in image_set.train])
        hidden = rng.permutation(np.flatnonzero(number < 0))
        _refuse_few(hidden, self.clients * contaminants, "contaminants", image_set)
        indices_of = [
            [hidden[client * contaminants : (client + 1) * contaminants]] for client in range(self.clients)
        ]
        left = []
        for k, name in enumerate(classes):
            holders = indices_of[k :: len(classes)]
            pile = rng.permutation(np.flatnonzero(number == k))
            _refuse_few(pile, len(holders) * dominant, f"images of class '{name}'", image_set)
            for i, images in enumerate(holders):
                images.append(pile[i * dominant : (i + 1) * dominant])
            left.append(pile[len(holders) * dominant :])
        rest = np.concatenate(left)
        for client, images in enumerate(indices_of):
            k = client % len(classes)
            chosen = rng.permutation(np.flatnonzero(number[rest] != k))[:others]
            _refuse_few(
                chosen, others, f"images that are not of class '{classes[k]}' for client {client}", image_set
            )
            images.append(rest[chosen])
            rest = np.delete(rest, chosen)
        return Partition.of_clients(np.concatenate(images) for images in indices_of)


def _refuse_few(pile: np.ndarray, needed: int, kind: str, image_set: Images) -> None:
    """Refuses a pile of images that is smaller than clients need it."""
    if len(pile) < needed:
        raise UserError(
            f"partition needs {needed} {kind}, {image_set.name} has {len(pile)} left; change partition.size, clients,"
            " dominant or contamination"
        )


@dataclass(frozen=True)
class ByProduct:
    """One or several whole categories (product types, or classes) a client: the strongest skew.

    Attributes:
        clients: Number of clients; the categories are dealt to them in turn. None gives each category a client of
            its own.

    Raises:
        UserError: There are more clients than categories.
    """

    clients: int | None = None

    def __post_init__(self) -> None:
        at_least("partition", 1, clients=self.clients)

    def __call__(self, image_set: Images, seed: int) -> Partition:
        """Deals the categories in order; nothing is random."""
        piles = list(indices_by_category(image_set).values())
        clients = len(piles) if self.clients is None else self.clients
        if clients > len(piles):
            raise UserError(
                f"partition.clients={clients}: more than the products or classes, of which there are"
                f" {len(piles)}; lower it"
            )
        return Partition.of_clients(chain.from_iterable(piles[client::clients]) for client in range(clients))


@dataclass(frozen=True)
class ByGroup:
    """Whole groups of images, such as all images of a patient, dealt to clients at random.

    Groups come in random order, and each goes to the client that holds the fewest images so far.

    Attributes:
        group: Regular expression: images whose paths it finds the same text in belong together.
        clients: Number of clients.

    Raises:
        UserError: The expression is none or not found in a path, the images are no files, or there are fewer groups
            than clients.
    """

    group: str
    clients: int = 5

    def __post_init__(self) -> None:
        at_least("partition", 1, clients=self.clients)

    def __call__(self, image_set: Images, seed: int) -> Partition:
        """Deals the groups of the training images with ``seed``."""
        names = image_groups(image_set.train, self.group, "partition.group")
        groups = list(grouped((name, index) for index, name in enumerate(names)).values())
        if self.clients > len(groups):
            raise UserError(
                f"partition: {self.clients} clients but {len(groups)} groups of images; lower partition.clients, or"
                " give another partition.group"
            )
        indices_of: list[list[int]] = [[] for _ in range(self.clients)]
        for number in numpy_generator(seed, "partition").permutation(len(groups)):
            min(indices_of, key=len).extend(groups[number])
        return Partition.of_clients(indices_of)


@dataclass(frozen=True)
class IID:
    """Equally large clients with images at random.

    Attributes:
        clients: Number of clients.

    Raises:
        UserError: There are more clients than images.
    """

    clients: int = 5

    def __post_init__(self) -> None:
        at_least("partition", 1, clients=self.clients)

    def __call__(self, image_set: Images, seed: int) -> Partition:
        """Shuffles the training images with ``seed`` and cuts them into even parts."""
        images = len(image_set.train)
        if self.clients > images:
            raise UserError(
                f"partition: {self.clients} clients but {images} training images; lower partition.clients"
            )
        return Partition.of_clients(
            np.array_split(numpy_generator(seed, "partition").permutation(images), self.clients)
        )


@dataclass(frozen=True)
class Pooled:
    """One client that holds everything: the centralised bound."""

    def __call__(self, image_set: Images, seed: int) -> Partition:
        """Takes all training images; nothing is random."""
        return Partition.of_clients([range(len(image_set.train))])


def even_split(images: int, clients: int = 5) -> str:
    """Returns the words of a partition that any set of images allows: at least ten images a client, dealt evenly.

    Args:
        images: Number of training images.
        clients: Largest number of clients.
    """
    possible = min(clients, images // 10)
    return f"partition=iid partition.clients={possible}" if possible > 1 else "partition=pooled"
