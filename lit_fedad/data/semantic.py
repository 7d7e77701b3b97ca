"""Semantic anomaly detection: images of known classes are normal, those of other sets are anomalous."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
import torch

from lit_fedad.core.bounds import at_least
from lit_fedad.core.errors import UserError
from lit_fedad.core.files import expand_home
from lit_fedad.data.labelled import LabelledSet, draw, resized


@dataclass(frozen=True, eq=False)
class SemanticSet(LabelledSet):
    """Normal images of several classes and anomalous ones of other sets.

    ``classes`` are the normal classes followed by the names of the anomaly sets, and a label is a position in
    them. Training images are the normal ones and the *contaminants*, unlabelled anomalies that a partition may
    hide among them; the partition decides which client holds which of them, and which are left out.

    Attributes:
        anomalies: Names of the anomaly sets: the last of ``classes``.
    """

    kind: ClassVar[Literal["classification", "anomaly"]] = "anomaly"

    anomalies: tuple[str, ...] = ()

    @property
    def normal_classes(self) -> int:
        """Number of classes without the anomaly sets."""
        return len(self.classes) - len(self.anomalies)


def semantic(
    root: str | Path,
    normal: Callable[[Path], LabelledSet],
    anomalies: Mapping[str, Callable[[Path], LabelledSet]],
    name: str,
    test_per_set: int | None = None,
    contaminants: int | None = None,
    seed: int = 0,
) -> SemanticSet:
    """Reads a normal set and anomaly sets that lie in one folder (or are linked there), and joins them (`join`).

    ``normal`` and ``anomalies`` are functions that read a set from the folder ``root``: in a configuration, nodes with
    ``_partial_: true`` and without their ``root``.

    Raises:
        UserError: As in `join`, or if a set cannot be read.
    """
    folder = expand_home(root)
    normal_set, others = normal(folder), {other: read(folder) for other, read in anomalies.items()}
    return join(normal_set, others, name, test_per_set, contaminants, seed)


def join(
    normal: LabelledSet,
    anomalies: Mapping[str, LabelledSet],
    name: str,
    test_per_set: int | None = None,
    contaminants: int | None = None,
    seed: int = 0,
) -> SemanticSet:
    """Joins a normal set and anomaly sets (FADngs, experiments).

    Args:
        normal: The normal set, whose classes are the normal ones; ``mean`` and ``std`` of the joined set are its own.
        anomalies: Name -> set; its classes do not matter, and it may lack training images. Images are scaled to
            the size of the normal ones.
        name: Name of the joined set.
        test_per_set: At most this many random test images of each anomaly set; None takes all.
        contaminants: At most this many random training images of all anomaly sets together; None takes all.
        seed: Seed of both draws. The test images of a set do not depend on the other sets.

    Raises:
        UserError: There is no anomaly set, one has the name of a normal class, other channels or no test image, or
            a limit is below 0 (for ``test_per_set`` below 1).
    """
    if not anomalies:
        raise UserError(f"{name}: has no anomaly set; give at least one under anomalies")
    for other, images in anomalies.items():
        if other in normal.classes:
            raise UserError(
                f"{name}: anomaly set '{other}' has the name of a class of {normal.name}; rename it under anomalies"
            )
        if images.channels != normal.channels:
            raise UserError(
                f"{name}: images of anomaly set '{other}' have {images.channels} channels, those of {normal.name}"
                f" {normal.channels}; read both with the same channels"
            )
        if not len(images.test_images):
            raise UserError(f"{name}: anomaly set '{other}' has no test image; give it some or leave it out")
    at_least("data", 1, test_per_set=test_per_set)
    train_images, train_labels = [normal.train_images], [normal.train_labels]
    test_images, test_labels = [normal.test_images], [normal.test_labels]
    height, width = normal.train_images.shape[2:]
    ends = np.cumsum([0, *(len(images.train_images) for images in anomalies.values())])
    drawn = draw(int(ends[-1]), contaminants, "contaminants", seed)
    for number, (other, images) in enumerate(anomalies.items()):
        train_positions = drawn[(drawn >= ends[number]) & (drawn < ends[number + 1])] - ends[number]
        test_positions = draw(len(images.test_images), test_per_set, "test_per_set", seed, other)
        label = len(normal.classes) + number
        train_images.append(resized(images.train_images[train_positions], height, width))
        test_images.append(resized(images.test_images[test_positions], height, width))
        train_labels.append(torch.full((len(train_positions),), label))
        test_labels.append(torch.full((len(test_positions),), label))
    return SemanticSet(
        name,
        (*normal.classes, *anomalies),
        *(torch.cat(train_images), torch.cat(train_labels)),
        *(torch.cat(test_images), torch.cat(test_labels)),
        *(normal.mean, normal.std),
        tuple(anomalies),
    )
