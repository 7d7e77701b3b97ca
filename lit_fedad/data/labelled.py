"""Labelled images in memory: image sets for classification, and their batches."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import ClassVar, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import functional as tvf

from lit_fedad.contracts.randomness import numpy_generator
from lit_fedad.core.bounds import at_least
from lit_fedad.core.errors import UserError
from lit_fedad.data.datamodule import Batch, BatchDataset
from lit_fedad.data.sample import ImageSet
from lit_fedad.data.transform import Fit, ImageTransform, each_channel


def draw(population: int, limit: int | None, key: str, *seed: object) -> np.ndarray:
    """Draws the positions of at most ``limit`` of so many images.

    Args:
        population: Number of images.
        limit: At most this many; None takes all.
        key: Configuration key of the limit, for messages and for the seed.
        seed: Seed of the draw; a smaller draw is part of a larger one.

    Returns:
        Positions in ascending order, int64 [drawn].

    Raises:
        UserError: If the limit is below 0.

    Example:
        >>> len(draw(10, 4, "count", 0)), draw(3, None, "count", 0).tolist()
        (4, [0, 1, 2])
    """
    at_least("data", 0, **{key: limit})
    if limit is None or limit >= population:
        return np.arange(population)
    return np.sort(numpy_generator(key, *seed).permutation(population)[:limit])


def resized(images: Tensor, height: int, width: int) -> Tensor:
    """Scales images bilinearly, antialiased: uint8 [N, 3, H, W] to [N, 3, height, width]."""
    if not len(images):
        return images.new_empty(0, 3, height, width)
    # Returns its argument where there is nothing to do.
    return tvf.resize(images, [height, width], InterpolationMode.BILINEAR, antialias=True)


def read_images(paths: Sequence[Path], size: int, fit: Fit = "crop") -> Tensor:
    """Reads image files as square images, scaled bicubically and antialiased.

    Args:
        paths: N image files.
        size: Side of the square images in pixels.
        fit: How they get this shape, as in `ImageTransform`: by default the short side is scaled and the centre kept.

    Returns:
        RGB images, uint8 [N, 3, size, size].

    Raises:
        UserError: A file cannot be read as an image.
    """
    transform = ImageTransform(size, fit=fit)
    images = torch.empty(len(paths), 3, size, size, dtype=torch.uint8)
    for image, path in zip(images, paths, strict=True):
        image.copy_(transform.raw(path).permute(2, 0, 1))
    return images


HALF = (0.5,)
"""Mean or standard deviation of every channel where no other is known."""


class LabelledImage(NamedTuple):
    """A labelled image as partitions and figures see it, without its pixels.

    Attributes:
        category: Name of its class.
    """

    category: str

    @property
    def name(self) -> str:
        """The name of its class: a labelled image has no file name."""
        return self.category


@dataclass(frozen=True, eq=False)
class LabelledSet:
    """Training and test images of several classes.

    A partition strategy takes it as it takes an `ImageSet`: its classes are its categories.

    Attributes:
        name: Short name, used in run names and tables.
        classes: The K class names; a label is a position in it.
        train_images: uint8 [N, C, H, W], C = 3, or 1 for grey images; none in a set that is only tested on.
        train_labels: int64 [N], in 0 .. K - 1.
        test_images: uint8 [M, C, H, W].
        test_labels: int64 [M], in 0 .. K - 1.
        mean: Mean of each channel in [0, 1], for normalisation; given as one number, it is that of all.
        std: Standard deviation of each channel, likewise.

    Raises:
        UserError: If images have neither 1 nor 3 channels, or ``mean`` and ``std`` do not fit them.
    """

    kind: ClassVar[Literal["classification", "anomaly"]] = "classification"
    has_masks: ClassVar[bool] = False

    name: str
    classes: tuple[str, ...]
    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor
    mean: Sequence[float] = HALF
    std: Sequence[float] = HALF

    def __post_init__(self) -> None:
        if self.channels not in (1, 3):
            raise UserError(
                f"{self.name}: its images have {self.channels} channels; give 3, or 1 for grey ones"
            )
        mean, std = each_channel(self.name, self.mean, self.std, self.channels)
        object.__setattr__(self, "mean", mean)
        object.__setattr__(self, "std", std)

    @property
    def channels(self) -> int:
        """Number of channels C."""
        return self.train_images.shape[1]

    @property
    def categories(self) -> list[str]:
        """The class names."""
        return list(self.classes)

    @property
    def normal_classes(self) -> int:
        """Number of normal classes: smaller labels are normal, the others anomalous."""
        return len(self.classes)

    @property
    def normal_categories(self) -> list[str]:
        """Names of the normal classes."""
        return self.categories[: self.normal_classes]

    @cached_property
    def train(self) -> tuple[LabelledImage, ...]:
        """The training images in order."""
        return self._described(self.train_labels)

    @cached_property
    def test(self) -> tuple[LabelledImage, ...]:
        """The test images in order."""
        return self._described(self.test_labels)

    def subset(
        self, train_per_class: int | None = None, test_per_class: int | None = None, seed: int = 0
    ) -> "LabelledSet":
        """Draws at most so many images of each class; they keep their order.

        Args:
            train_per_class: At most this many training images of each class; None takes all.
            test_per_class: At most this many test images of each class; None takes all.
            seed: Seed of the draw. The choice in a class does not depend on the others, and a smaller choice is
                part of a larger one.

        Raises:
            UserError: If a limit is below 1.
        """
        train = balanced(self.train_labels, "train", train_per_class, seed)
        test = balanced(self.test_labels, "test", test_per_class, seed)
        return replace(
            self,
            train_images=self.train_images[train],
            train_labels=self.train_labels[train],
            test_images=self.test_images[test],
            test_labels=self.test_labels[test],
        )

    def _described(self, labels: Tensor) -> tuple[LabelledImage, ...]:
        by_label = [LabelledImage(name) for name in self.classes]
        return tuple(by_label[label] for label in labels.tolist())


Images = ImageSet | LabelledSet
"""Image set that a partition divides: files to find anomalies in, or arrays to classify."""


class LabelledTargets:
    """Labels of labelled images in memory.

    Args:
        labels: int64 [N].
        normal_classes: Number of the classes that are normal, where classes stand behind normal and anomalous; None
            where labels are classes.
        products: Number of products that the task tells apart. Images count as of none of them, for a product would
            give away the anomalies that may hide among normal images.
    """

    def __init__(self, labels: Tensor, normal_classes: int | None = None, products: int = 0) -> None:
        self._labels, self._normal_classes, self._products = labels, normal_classes, products

    def __getitem__(self, indices: Sequence[int]) -> Batch:
        """Returns label and index of the images at these positions; with normal classes also category and product."""
        index = torch.as_tensor(indices, dtype=torch.int64)
        if self._normal_classes is None:
            return Batch(label=self._labels[index], index=index)
        category = self._labels[index]
        product = torch.full_like(index, self._products)
        label = (category >= self._normal_classes).long()
        return Batch(label=label, index=index, category=category, product=product)


class LabelledDataset(BatchDataset):
    """Normalised images with their labels.

    Args:
        images: uint8 [N, C, H, W].
        labels: int64 [N].
        mean: Mean of each channel in [0, 1], or of all.
        std: Standard deviation, likewise.
        normal_classes: As in `LabelledTargets`.
        products: As there.

    Example:
        >>> grey = torch.full((1, 1, 2, 2), 51, dtype=torch.uint8)
        >>> dataset = LabelledDataset(grey, torch.tensor([7]), mean=HALF, std=HALF)
        >>> round(dataset[0]["image"].mean().item(), 4), dataset[0]["label"].item()
        (-0.6, 7)
    """

    def __init__(
        self,
        images: Tensor,
        labels: Tensor,
        mean: Sequence[float] = HALF,
        std: Sequence[float] = HALF,
        normal_classes: int | None = None,
        products: int = 0,
    ) -> None:
        self._images, self._targets = images, LabelledTargets(labels, normal_classes, products)
        # Of pixels in 0 .. 255, so that a batch takes one subtraction and one division.
        self._mean = 255 * torch.tensor(mean, dtype=torch.float32).view(-1, 1, 1)
        self._std = 255 * torch.tensor(std, dtype=torch.float32).view(-1, 1, 1)

    def __len__(self) -> int:
        return len(self._images)

    def __getitems__(self, indices: Sequence[int]) -> Batch:
        """Returns a whole batch."""
        batch = self._targets[indices]
        batch["image"] = self.normalise(self._images[batch["index"]])
        return batch

    def normalise(self, images: Tensor) -> Tensor:
        """Normalises images, uint8 [N, C, H, W], to float32 of the same shape."""
        return images.float().sub_(self._mean).div_(self._std)


def balanced(labels: Tensor, part: Literal["train", "test"], limit: int | None, seed: int) -> Tensor | slice:
    """Draws the positions of the images of a subset; see `LabelledSet.subset`.

    Args:
        labels: int64 [N].
        part: Whether these are training or test images.
        limit: At most this many of each class; None takes all.
        seed: Seed of the draw.

    Returns:
        Positions in ascending order, int64, or a slice of all.

    Raises:
        UserError: If the limit is below 1.
    """
    at_least("data", 1, **{f"{part}_per_class": limit})
    if limit is None or not len(labels):
        return slice(None)  # a view: nothing is copied
    by_class = {label: np.flatnonzero(labels.numpy() == label) for label in labels.unique().tolist()}
    chosen = [
        numpy_generator(seed, f"{part} subset", label).permutation(members)[:limit]
        for label, members in by_class.items()
    ]
    return torch.from_numpy(np.sort(np.concatenate(chosen)))
