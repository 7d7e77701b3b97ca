"""How the training images are dealt to the clients."""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import numpy as np

from lit_fedad.contracts.randomness import numpy_generator
from lit_fedad.data.labelled import Images, LabelledImage
from lit_fedad.data.sample import Sample
from lit_fedad.data.semantic import SemanticSet
from lit_fedad.errors import UserError

_MAX_DRAWS = 10_000

Schedule = Literal["stage_major", "literal"]


@dataclass(frozen=True)
class Partition:
    """Which client holds which training images.

    Attributes:
        clients: For every client the indices of its images in ``ImageSet.train``, in ascending order.
        stages: For every client its tasks in the order in which they come, each the ascending indices of its
            images; ``clients`` is their union. None where all images are there from the start.
        reserved: Ascending indices of images that no client holds because the server keeps them.
        schedule: When the stages come, as in `StreamDataModule`.
    """

    clients: tuple[tuple[int, ...], ...]
    _: KW_ONLY
    stages: tuple[tuple[tuple[int, ...], ...], ...] | None = None
    reserved: tuple[int, ...] = ()
    schedule: Schedule = "stage_major"

    @classmethod
    def in_stages(
        cls,
        stages: Iterable[Iterable[Iterable[int]]],
        reserved: Iterable[int] = (),
        schedule: Schedule = "stage_major",
    ) -> "Partition":
        """The partition of clients whose images arrive task after task.

        Args:
            stages: For every client the image indices of each of its tasks, in any order within a task.
            reserved: Indices of the images that the server keeps.
            schedule: When the stages come, as in `StreamDataModule`.

        Example:
            >>> Partition.in_stages([[[4, 0], [2]], [[1]]], reserved=[3]).clients
            ((0, 2, 4), (1,))
        """
        tasks = tuple(tuple(_ascending(task) for task in client) for client in stages)
        clients = tuple(_ascending(set(chain.from_iterable(client))) for client in tasks)
        return cls(clients, stages=tasks, reserved=_ascending(reserved), schedule=schedule)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of images of every client."""
        return tuple(map(len, self.clients))

    @property
    def tasks(self) -> tuple[tuple[tuple[int, ...], ...], ...]:
        """The stages; without any, one a client that holds all its images."""
        return tuple((indices,) for indices in self.clients) if self.stages is None else self.stages

    def counts(self, image_set: Images) -> np.ndarray:
        """Counts the images of every client and product type.

        Returns:
            int64 [clients, products], products in the order of ``image_set.products``.
        """
        return _count(self.clients, image_set)

    def stage_counts(self, image_set: Images) -> list[np.ndarray]:
        """Counts the images of every stage and product type.

        Returns:
            For every client int64 [stages, products], products in the order of ``image_set.products``.
        """
        rows = _count(list(chain.from_iterable(self.tasks)), image_set)
        return np.split(rows, np.cumsum([len(stages) for stages in self.tasks])[:-1])

    def save(self, path: str | Path) -> None:
        """Writes the index lists as JSON, a form that ``FromFile`` reads back."""
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        key, clients = ("clients", self.clients) if self.stages is None else ("stages", self.stages)
        rows = ",\n  ".join(map(json.dumps, clients))
        more = f', "reserved": {json.dumps(self.reserved)}' if self.reserved else ""
        if self.schedule != "stage_major":
            more += f', "schedule": {json.dumps(self.schedule)}'
        Path(path).write_text(f'{{"{key}": [\n  {rows}\n]{more}}}\n')

    @classmethod
    def load(cls, path: str | Path) -> "Partition":
        """Reads index lists from JSON.

        The file holds ``{"clients": [[...], ...]}`` or the list of lists alone; for images that arrive in stages
        ``{"stages": [[[...], ...], ...]}``, one list a client with one list a stage. An object may have a list
        ``"reserved"``, and with stages a ``"schedule"``. FedVCK's split files say ``"client_idx"`` for
        ``"clients"``; their ``"client_classes"``, which the images tell, are passed over.

        Raises:
            UserError: The file is missing or does not hold one list of whole numbers a client, or a client and
                stage.
        """
        try:
            content = json.loads(Path(path).read_text())
        except OSError as error:
            raise UserError(
                f"{path}: cannot be read ({error.strerror}); give an existing partition file"
            ) from error
        except ValueError as error:
            raise UserError(
                f"{path}: is not JSON ({error}); write one list of image indices a client"
            ) from error
        if not isinstance(content, dict):
            content = {"clients": content}
        if "client_idx" in content:
            content = {"clients": content["client_idx"]}
        if "clients" in content and "stages" in content:
            raise UserError(f"{path}: holds both clients and stages; keep one of the two")
        clients = content.get("clients", content.get("stages"))
        if not isinstance(clients, list):
            raise UserError(f"{path}: holds no list of clients; write one list of image indices a client")
        reserved = _whole_numbers(content.get("reserved", []), f"{path}: reserved")
        if "clients" in content:
            own = [_whole_numbers(own, f"{path}: client {client}") for client, own in enumerate(clients)]
            return cls(tuple(map(_ascending, own)), reserved=_ascending(reserved))
        for client, tasks in enumerate(clients):
            if not isinstance(tasks, list) or not tasks:
                raise UserError(f"{path}: client {client} has no list of stages; write one list a stage")
            for stage, indices in enumerate(tasks):
                _whole_numbers(indices, f"{path}: stage {stage} of client {client}")
        return cls.in_stages(clients, reserved, content.get("schedule", "stage_major"))

    @classmethod
    def _of(cls, clients: Iterable[Iterable[int]]) -> "Partition":
        return cls(tuple(map(_ascending, clients)))

    def _lists(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Every list of indices, with whose it is."""
        for client, tasks in enumerate(self.tasks):
            for stage, indices in enumerate(tasks):
                owner = f"client {client}"
                yield (owner if self.stages is None else f"stage {stage} of {owner}"), indices
        if self.reserved:
            yield "the server (reserved)", self.reserved


Strategy = Callable[[Images, int], Partition]
"""A partition strategy: image set and seed in, partition out."""


@dataclass(frozen=True)
class Dirichlet:
    """Label-skewed clients: each product type is split by its own draw from Dir(alpha).

    For every type p, q_p ~ Dirichlet(alpha * 1_N) gives the shares of the N clients (FedDyMem, experiments).
    All types are drawn anew until every client is large enough.

    Attributes:
        clients: Number of clients N.
        alpha: Concentration; small values leave each type with few clients.
        min_size: Fewest images a client may hold.
        balance: Clients that already hold their even share of all images get nothing of the types that
            follow, as in PFLlib; sizes become more alike.

    Raises:
        UserError: A number is out of range, or ``min_size`` was not reached in 10,000 draws.
    """

    clients: int = 5
    alpha: float = 0.1
    min_size: int = 10
    balance: bool = False

    def __post_init__(self) -> None:
        _check_clients(self.clients)
        if not self.alpha > 0 or self.min_size < 0:
            raise UserError(
                f"partition alpha={self.alpha}, min_size={self.min_size}: alpha > 0 and min_size >= 0"
            )

    def __call__(self, image_set: Images, seed: int) -> Partition:
        """Splits every product type of the training images by shares drawn from ``seed``."""
        rng = numpy_generator(seed, "partition")
        types = [rng.permutation(indices) for indices in indices_by_product(image_set).values()]
        totals = np.array([len(indices) for indices in types])
        possible = self.clients * self.min_size <= totals.sum()
        for _ in range(_MAX_DRAWS if possible else 0):
            counts = self._draw_counts(rng, totals)
            if counts.sum(axis=0).min() >= self.min_size:
                break
        else:
            raise UserError(
                f"partition: no draw with alpha={self.alpha} gave each of {self.clients} clients"
                f" min_size={self.min_size} of the {totals.sum()} images; lower min_size or clients"
            )
        pieces = [np.split(indices, np.cumsum(row)[:-1]) for indices, row in zip(types, counts, strict=True)]
        return Partition._of(np.concatenate(own) for own in zip(*pieces, strict=True))

    def _draw_counts(self, rng: np.random.Generator, totals: np.ndarray) -> np.ndarray:
        """How many images of every type each client gets, int64 [types, clients]."""
        counts = np.zeros((len(totals), self.clients), dtype=np.int64)
        for row, total in zip(counts, totals, strict=True):
            shares = rng.dirichlet(np.full(self.clients, self.alpha))
            if self.balance:
                unfilled = counts.sum(axis=0) < totals.sum() / self.clients
                shares = shares * unfilled
                # With a tiny alpha all the mass may lie on clients that are full.
                shares = shares / shares.sum() if shares.sum() > 0 else unfilled / unfilled.sum()
            edges = np.rint(np.cumsum(shares)[:-1] * total).clip(max=total)
            row[:] = np.diff(edges, prepend=0, append=total)
        return counts


@dataclass(frozen=True)
class DominantClass:
    """Equally large clients, each with one dominant class and a few contaminants (FADngs, setup).

    Client c holds round(contamination * size) contaminants, round(dominant * the rest) images of normal class c
    modulo their number, and random ones of the other normal classes: 10 + 891 + 99 by default. Halves are rounded
    to even. No image is given twice, and those left over are given to nobody.

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
        _check_clients(self.clients)
        if self.size < 1 or not 0 <= self.dominant <= 1 or not 0 <= self.contamination < 1:
            raise UserError(
                f"partition size={self.size}, dominant={self.dominant}, contamination={self.contamination}:"
                " size >= 1, dominant from 0 to 1, contamination from 0 to below 1"
            )

    def __call__(self, image_set: Images, seed: int) -> Partition:
        """Draws every client's images with ``seed``: dominant ones first, then the others, client by client."""
        rng = numpy_generator(seed, "partition")
        contaminants = round(self.contamination * self.size)
        dominant = round(self.dominant * (self.size - contaminants))
        others = self.size - contaminants - dominant
        anomalies = image_set.anomalies if isinstance(image_set, SemanticSet) else ()
        classes = [product for product in image_set.products if product not in anomalies]
        column = {product: number for number, product in enumerate(classes)}
        # Contaminants have no number among the normal classes.
        number = np.array([column.get(sample.product, -1) for sample in image_set.train])
        self._check_contaminants(image_set, contaminants, int(np.sum(number < 0)))

        hidden = rng.permutation(np.flatnonzero(number < 0))
        own = [
            [hidden[client * contaminants : (client + 1) * contaminants]] for client in range(self.clients)
        ]
        left = []
        for k, name in enumerate(classes):
            holders = own[k :: len(classes)]
            pile = rng.permutation(np.flatnonzero(number == k))
            if len(pile) < len(holders) * dominant:
                raise UserError(
                    f"partition: {len(holders)} client(s) with {dominant} images of class '{name}' need"
                    f" {len(holders) * dominant}, {image_set.name} has {len(pile)}; lower size, dominant or clients"
                )
            for i, images in enumerate(holders):
                images.append(pile[i * dominant : (i + 1) * dominant])
            left.append(pile[len(holders) * dominant :])
        rest = np.concatenate(left)
        for client, images in enumerate(own):
            k = client % len(classes)
            chosen = rng.permutation(np.flatnonzero(number[rest] != k))[:others]
            if len(chosen) < others:
                raise UserError(
                    f"partition: client {client} needs {others} images of other classes than '{classes[k]}',"
                    f" {len(chosen)} are left in {image_set.name}; lower size or clients, or raise dominant"
                )
            images.append(rest[chosen])
            rest = np.delete(rest, chosen)
        return Partition._of(np.concatenate(images) for images in own)

    def _check_contaminants(self, image_set: Images, each: int, present: int) -> None:
        if present < self.clients * each:
            raise UserError(
                f"partition: {self.clients} client(s) with {each} contaminants need {self.clients * each},"
                f" {image_set.name} has {present}; give partition.contamination=0, or data with more"
                " contaminants"
            )


@dataclass(frozen=True)
class ByProduct:
    """One or several whole product types a client: the strongest skew.

    Attributes:
        clients: Number of clients; the types are dealt to them in turn. None gives each type a client of its
            own.

    Raises:
        UserError: There are more clients than product types.
    """

    clients: int | None = None

    def __post_init__(self) -> None:
        _check_clients(1 if self.clients is None else self.clients)

    def __call__(self, image_set: Images, seed: int) -> Partition:
        """Deals the product types in order; nothing is random."""
        types = list(indices_by_product(image_set).values())
        clients = len(types) if self.clients is None else self.clients
        if clients > len(types):
            raise UserError(
                f"partition: {clients} clients but {len(types)} product types; lower clients to that"
            )
        return Partition._of(chain.from_iterable(types[client::clients]) for client in range(clients))


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
        _check_clients(self.clients)

    def __call__(self, image_set: Images, seed: int) -> Partition:
        """Shuffles the training images with ``seed`` and cuts them into even parts."""
        images = len(image_set.train)
        if self.clients > images:
            raise UserError(f"partition: {self.clients} clients but {images} training images; lower clients")
        return Partition._of(
            np.array_split(numpy_generator(seed, "partition").permutation(images), self.clients)
        )


@dataclass(frozen=True)
class Pooled:
    """One client holds everything: the centralised bound."""

    def __call__(self, image_set: Images, seed: int) -> Partition:
        """Takes all training images; nothing is random."""
        return Partition._of([range(len(image_set.train))])


@dataclass(frozen=True)
class FromFile:
    """The index lists of a JSON file, as ``Partition.save`` writes them; images may be left out, clients be empty.

    Attributes:
        path: The file.
        clients: Number of clients the file must hold; None takes any.

    Raises:
        UserError: The file cannot be read, an index is out of range or used twice, a stage has no images, or no
            client has any.
    """

    path: str | Path
    clients: int | None = None

    def __call__(self, image_set: Images, seed: int) -> Partition:
        """Reads the file and checks it against the training images; nothing is random."""
        partition = Partition.load(self.path)
        images = len(image_set.train)
        if not partition.clients or (self.clients or len(partition.clients)) != len(partition.clients):
            expected = "at least 1" if self.clients is None else self.clients
            raise UserError(
                f"{self.path}: holds {len(partition.clients)} clients, expected {expected}; change either"
            )
        if not any(partition.clients):
            raise UserError(f"{self.path}: no client has an image; give them some")
        owner: dict[int, str] = {}
        for holder, indices in partition._lists():
            if partition.stages is not None and not indices:
                raise UserError(f"{self.path}: {holder} has no images; give it some or remove it")
            for index in indices:
                if not 0 <= index < images:
                    raise UserError(
                        f"{self.path}: {holder} lists image {index}, but {image_set.name} has images"
                        f" 0 to {images - 1}; correct it, or give the set that the file was made for"
                    )
                if index in owner:
                    raise UserError(
                        f"{self.path}: image {index} is listed for {owner[index]} and again for {holder};"
                        " keep one of the two"
                    )
                owner[index] = holder
        return partition


def _check_clients(clients: int) -> None:
    if clients < 1:
        raise UserError(f"partition clients={clients}: give at least 1")


def _ascending(indices: Iterable[int]) -> tuple[int, ...]:
    return tuple(sorted(map(int, indices)))


def _count(groups: Sequence[Sequence[int]], image_set: Images) -> np.ndarray:
    """Images of every group and product type, int64 [groups, products]."""
    column = {product: j for j, product in enumerate(image_set.products)}
    counts = np.zeros((len(groups), len(column)), dtype=np.int64)
    for row, indices in zip(counts, groups, strict=True):
        for index in indices:
            row[column[image_set.train[index].product]] += 1
    return counts


def _whole_numbers(indices: Any, where: str) -> list[int]:
    # type(), for JSON's true and false are whole numbers to isinstance.
    if not isinstance(indices, list) or any(type(index) is not int for index in indices):
        raise UserError(f"{where} is not a list of whole numbers; list its image indices")
    return indices


def indices_by_product(image_set: Images) -> dict[str, list[int]]:
    """The training indices of every product type that has any, in order of first appearance."""
    by_product: dict[str, list[int]] = {}
    samples: Sequence[Sample | LabelledImage] = image_set.train
    for index, sample in enumerate(samples):
        by_product.setdefault(sample.product, []).append(index)
    return by_product
