"""Partitions of the training images among clients, and their files."""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import numpy as np

from lit_fedad.core.errors import UserError
from lit_fedad.data.input_files import read_json
from lit_fedad.data.labelled import Images, LabelledImage
from lit_fedad.data.sample import Sample, grouped

Schedule = Literal["stage_major", "literal"]
"""Order of the stages: ``"stage_major"``, each comes once; ``"literal"``, all come in turns, again and again."""


@dataclass(frozen=True)
class Partition:
    """Assignment of training images to clients.

    Attributes:
        clients: For every client the indices of its images in ``ImageSet.train``, in ascending order.
        stages: For every client the ascending indices of its images in each stage, in the order of the stages;
            ``clients`` is their union. None where all images are there from the start.
        reserved: Ascending indices of images that the server keeps and no client holds.
        schedule: When the stages come, as in `StreamDataModule`.
        calibration: For every client the ascending indices of images that it holds, and that nothing is trained with;
            empty where there are none.
    """

    clients: tuple[tuple[int, ...], ...]
    _: KW_ONLY
    stages: tuple[tuple[tuple[int, ...], ...], ...] | None = None
    reserved: tuple[int, ...] = ()
    schedule: Schedule = "stage_major"
    calibration: tuple[tuple[int, ...], ...] = ()

    @classmethod
    def of_clients(cls, clients: Iterable[Iterable[int]]) -> "Partition":
        """Builds the partition of clients that hold these image indices, in any order, from the start."""
        return cls(tuple(map(_ascending, clients)))

    @classmethod
    def in_stages(
        cls,
        stages: Iterable[Iterable[Iterable[int]]],
        reserved: Iterable[int] = (),
        schedule: Schedule = "stage_major",
    ) -> "Partition":
        """Builds the partition of clients whose images arrive in stages.

        Args:
            stages: For every client the image indices of each of its stages, in any order within a stage.
            reserved: Indices of the images that the server keeps.
            schedule: When the stages come, as in `StreamDataModule`.

        Example:
            >>> Partition.in_stages([[[4, 0], [2]], [[1]]], reserved=[3]).clients
            ((0, 2, 4), (1,))
        """
        ordered = tuple(tuple(_ascending(stage) for stage in client) for client in stages)
        clients = tuple(_ascending(set(chain.from_iterable(client))) for client in ordered)
        return cls(clients, stages=ordered, reserved=_ascending(reserved), schedule=schedule)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of images of every client."""
        return tuple(map(len, self.clients))

    @property
    def by_stage(self) -> tuple[tuple[tuple[int, ...], ...], ...]:
        """Image indices of every client and stage; one stage a client where all images are there from the start."""
        return tuple((indices,) for indices in self.clients) if self.stages is None else self.stages

    def deals(self, other: "Partition") -> bool:
        """Tells whether another partition deals the same images to each client, less those for calibration."""
        calibration = other.calibration or ((),) * len(other.clients)
        if len(self.clients) != len(other.clients) or self.reserved != other.reserved:
            return False
        holds_them = all(map(frozenset.issuperset, map(frozenset, self.clients), calibration))
        training = [
            [tuple(index for index in stage if index not in held_out) for stage in stages]
            for held_out, stages in zip(map(frozenset, calibration), self.by_stage, strict=True)
        ]
        return holds_them and training == list(map(list, other.by_stage))

    def counts(self, image_set: Images) -> np.ndarray:
        """Counts the training images of every client and category.

        Returns:
            int64 [clients, categories], categories in the order of ``image_set.categories``.
        """
        return _count(self.clients, image_set)

    def stage_counts(self, image_set: Images) -> list[np.ndarray]:
        """Counts the images of every stage and category.

        Returns:
            For every client int64 [stages, categories], categories in the order of ``image_set.categories``.
        """
        rows = _count(list(chain.from_iterable(self.by_stage)), image_set)
        return np.split(rows, np.cumsum([len(stages) for stages in self.by_stage])[:-1])

    def save(self, path: str | Path) -> None:
        """Writes the index lists as JSON, which `load` and `FromFile` read."""
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        key, clients = ("clients", self.clients) if self.stages is None else ("stages", self.stages)
        rows = ",\n  ".join(map(json.dumps, clients))
        more = f', "reserved": {json.dumps(self.reserved)}' if self.reserved else ""
        if self.schedule != "stage_major":
            more += f', "schedule": {json.dumps(self.schedule)}'
        if self.calibration:
            more += f', "calibration": {json.dumps(self.calibration)}'
        Path(path).write_text(f'{{"{key}": [\n  {rows}\n]{more}}}\n')

    @classmethod
    def load(cls, path: str | Path) -> "Partition":
        """Reads index lists from JSON.

        The file holds ``{"clients": [[...], ...]}`` or the list of lists alone; for images that arrive in stages
        ``{"stages": [[[...], ...], ...]}``, one list a client with one list a stage. An object may have a list
        ``"reserved"``, a list of lists ``"calibration"``, and with stages a ``"schedule"``. FedVCK's split files have
        ``"client_idx"`` in place of ``"clients"``; their ``"client_classes"``, which follow from the images, are
        ignored.

        Raises:
            UserError: The file is missing or does not hold one list of whole numbers a client, or a client and
                stage.
        """
        content = read_json(Path(path))
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
        calibration = _calibration(content, len(clients), path)
        if "clients" in content:
            images = [
                _whole_numbers(images, f"{path}: client {client}") for client, images in enumerate(clients)
            ]
            return cls(tuple(map(_ascending, images)), reserved=_ascending(reserved), calibration=calibration)
        for client, stages in enumerate(clients):
            if not isinstance(stages, list) or not stages:
                raise UserError(f"{path}: client {client} has no list of stages; write one list a stage")
            for stage, indices in enumerate(stages):
                _whole_numbers(indices, f"{path}: stage {stage} of client {client}")
        partition = cls.in_stages(clients, reserved, content.get("schedule", "stage_major"))
        return replace(partition, calibration=calibration)

    def index_lists(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yields every list of indices with the name of its holder, such as ``"stage 1 of client 0"``."""
        for client, stages in enumerate(self.by_stage):
            for stage, indices in enumerate(stages):
                owner = f"client {client}"
                yield (owner if self.stages is None else f"stage {stage} of {owner}"), indices
        for client, indices in enumerate(self.calibration):
            if indices:
                yield f"client {client} (calibration)", indices
        if self.reserved:
            yield "the server (reserved)", self.reserved


@dataclass(frozen=True)
class FromFile:
    """Partition strategy that reads a JSON file of index lists (see `Partition.load`).

    Images may be left out, and clients may hold none.

    Attributes:
        path: The file.
        clients: Number of clients that the file must hold; None takes any.

    Raises:
        UserError: The file cannot be read, an index is out of range or used twice, a stage has no images, or no
            client has any.
    """

    path: str | Path
    clients: int | None = None

    def __call__(self, image_set: Images, seed: int) -> Partition:
        """Reads the file and checks it against the training images; nothing is random."""
        partition = Partition.load(self.path)
        if not partition.clients or (self.clients or len(partition.clients)) != len(partition.clients):
            expected = "at least 1" if self.clients is None else self.clients
            raise UserError(
                f"{self.path}: holds {len(partition.clients)} clients, expected {expected}; change either"
            )
        if not any(partition.clients):
            raise UserError(f"{self.path}: no client has an image; give them some")
        for holder, indices in partition.index_lists():
            if partition.stages is not None and not indices:
                raise UserError(f"{self.path}: {holder} has no images; give it some or remove it")
        return checked(partition, image_set, str(self.path))


def checked(partition: Any, image_set: Images, source: str) -> Partition:
    """Returns what a strategy gives, if it is a partition of the training images.

    Args:
        partition: What the strategy gives.
        image_set: The images.
        source: Where the partition comes from, for errors.

    Raises:
        UserError: If it is no `Partition`, or an index is out of range or used twice.
    """
    if not isinstance(partition, Partition):
        raise UserError(f"{source} returns a {type(partition).__name__}, no Partition")
    images = len(image_set.train)
    owner: dict[int, str] = {}
    for holder, indices in partition.index_lists():
        for index in indices:
            if not 0 <= index < images:
                raise UserError(
                    f"{source}: {holder} lists image {index}, but {image_set.name} has images 0 to {images - 1};"
                    " correct it, or give the set that the file was made for"
                )
            if index in owner:
                raise UserError(
                    f"{source}: image {index} is listed for {owner[index]} and again for {holder};"
                    " keep one of the two"
                )
            owner[index] = holder
    return partition


def indices_by_category(image_set: Images) -> dict[str, list[int]]:
    """Groups the indices of the training images by category, categories in order of first appearance."""
    samples: Sequence[Sample | LabelledImage] = image_set.train
    return grouped((sample.category, index) for index, sample in enumerate(samples))


def _calibration(content: dict[str, Any], clients: int, path: str | Path) -> tuple[tuple[int, ...], ...]:
    held_out = content.get("calibration", [])
    if not isinstance(held_out, list) or len(held_out) not in (0, clients):
        raise UserError(f"{path}: calibration is not one list a client; correct it or leave it out")
    for client, indices in enumerate(held_out):
        _whole_numbers(indices, f"{path}: calibration of client {client}")
    return tuple(map(_ascending, held_out))


def _ascending(indices: Iterable[int]) -> tuple[int, ...]:
    return tuple(sorted(map(int, indices)))


def _count(groups: Sequence[Sequence[int]], image_set: Images) -> np.ndarray:
    """Counts the images of every group and category, int64 [groups, categories]."""
    column = {category: number for number, category in enumerate(image_set.categories)}
    counts = np.zeros((len(groups), len(column)), dtype=np.int64)
    for row, indices in zip(counts, groups, strict=True):
        for index in indices:
            row[column[image_set.train[index].category]] += 1
    return counts


def _whole_numbers(indices: Any, where: str) -> list[int]:
    # type(), because for isinstance JSON's true and false are whole numbers.
    if not isinstance(indices, list) or any(type(index) is not int for index in indices):
        raise UserError(f"{where} is not a list of whole numbers; list its image indices")
    return indices
