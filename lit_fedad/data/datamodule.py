"""Batches of the clients' training images and of the test set, for Fabric and for a plain Trainer."""

import math
import warnings
from collections.abc import Sequence
from typing import Any, TypedDict, cast

import lightning as L
import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset

from lit_fedad.core.errors import UserError, not_there
from lit_fedad.data.masks import mask_lines
from lit_fedad.data.regions import saturation_areas
from lit_fedad.data.sample import Sample
from lit_fedad.data.transform import ImageTransform


class Batch(TypedDict, total=False):
    """Batch of a loader: images or their features, never both.

    Attributes:
        image: Normalised images, float32 ``[B, C, H, W]``; C is 1 for grey, else 3. With a frozen encoder: features of
            the images, float32 ``[B, C]``.
        views: Features of random views of the images and of their rotations, float16 (as they are stored)
            ``[B, V, C]``; only where a loss needs them.
        turned: Features of the images turned by 0, 90, 180 and 270 degrees, float32 ``[B, 4, C]``; only where a score
            needs them.
        pyramid: Features of each backbone layer, float32 ``[B, C_l, H_l, W_l]``.
        label: 0 normal, 1 anomalous; the class where classes are learnt; int64 ``[B]``.
        mask: 1 on anomalous pixels, uint8 ``[B, H, W]``; absent unless asked for.
        regions: For each image int32 ``[regions, H, W]``: the saturation area of a region on its pixels, 0 elsewhere;
            only where each region has a mask of its own.
        index: Position in the data set, int64 ``[B]``.
        product: Position of the image's product among those that the task tells apart, or the number of these products
            where it is none of them, int64 ``[B]``.
        category: Position of the class or anomaly set in the image set's ``categories``, int64 ``[B]``; only where
            the two labels are made from classes.
    """

    image: Tensor
    views: Tensor
    turned: Tensor
    pyramid: tuple[Tensor, ...]
    label: Tensor
    mask: Tensor
    regions: tuple[Tensor, ...]
    index: Tensor
    product: Tensor
    category: Tensor


class Targets:
    """Labels and masks of samples; masks are read once and kept at one bit a pixel.

    Args:
        samples: The samples.
        transform: Transform that reads a mask.
        with_masks: Whether batches carry masks.
        products: Names of the products that the task tells apart.
    """

    def __init__(
        self,
        samples: Sequence[Sample],
        transform: ImageTransform,
        with_masks: bool,
        products: Sequence[str] = (),
    ) -> None:
        self._labels = torch.tensor([sample.label for sample in samples], dtype=torch.int64)
        positions = {product: position for position, product in enumerate(products)}
        self._products = torch.tensor(
            [positions.get(sample.category, len(positions)) for sample in samples], dtype=torch.int64
        )
        self._shape = transform.shape
        self._masks: np.ndarray | None = None
        if with_masks:
            facts = {}
            # Zeros that are never written take no memory, and most test images may be normal.
            self._masks = np.zeros((len(samples), math.ceil(math.prod(self._shape) / 8)), np.uint8)
            for packed, sample in zip(self._masks, samples, strict=True):
                if sample.mask is not None:
                    mask, facts[sample.mask] = transform.measured_mask(sample.mask, sample.path)
                    packed[:] = np.packbits(mask.numpy())
            for line in mask_lines(facts, transform.shape):
                warnings.warn(line, stacklevel=3)
        self._regions: list[Tensor] = []
        if with_masks and any(sample.saturation for sample in samples):
            self._regions = [saturation_areas(sample, transform).to_sparse() for sample in samples]

    def __getitem__(self, indices: Sequence[int]) -> Batch:
        """Returns label, index, product and, where wanted, mask and regions of the samples at these positions."""
        index = torch.as_tensor(indices, dtype=torch.int64)
        batch = Batch(label=self._labels[index], index=index, product=self._products[index])
        if self._masks is not None:
            bits = np.unpackbits(self._masks[index.numpy()], axis=1, count=math.prod(self._shape))
            batch["mask"] = torch.from_numpy(bits.reshape(-1, *self._shape))
        if self._regions:
            batch["regions"] = tuple(self._regions[position].to_dense() for position in index.tolist())
        return batch


class BatchDataset(Dataset):
    """Data set that gives whole batches, and single items of them."""

    def __getitems__(self, indices: Sequence[int]) -> Batch:
        """Returns a whole batch of the items at these positions."""
        raise not_there(self, "__getitems__")

    def __getitem__(self, index: int) -> Batch:
        """Returns one item, without the batch dimension."""
        batch = self.__getitems__([index])
        item: dict[str, Any] = {key: value[0] for key, value in batch.items() if isinstance(value, Tensor)}
        if "pyramid" in batch:
            item["pyramid"] = tuple(features[0] for features in batch["pyramid"])
        if "regions" in batch:
            item["regions"] = batch["regions"]
        return cast("Batch", item)


class ImageDataset(BatchDataset):
    """Images that are read from their files each time.

    Args:
        samples: The samples.
        transform: Transform from files to tensors.
        with_masks: Whether batches carry masks.
        products: Names of the products that the task tells apart.
    """

    def __init__(
        self,
        samples: Sequence[Sample],
        transform: ImageTransform,
        with_masks: bool = False,
        products: Sequence[str] = (),
    ) -> None:
        self._paths = [sample.path for sample in samples]
        self._transform = transform
        self._targets = Targets(samples, transform, with_masks, products)

    def __len__(self) -> int:
        return len(self._paths)

    def __getitems__(self, indices: Sequence[int]) -> Batch:
        """Returns a whole batch."""
        batch = self._targets[indices]
        batch["image"] = torch.stack([self._transform.image(self._paths[index]) for index in indices])
        return batch


class FederatedDataModule(L.LightningDataModule):
    """Training images of each client, and one test set.

    Args:
        train: Normal images, or images of all classes: a data set whose ``__getitems__`` gives a `Batch`.
        test: Normal and anomalous images, or images of all classes, likewise.
        partition: For every client the indices of its images in ``train``.
        batch_size: Training images a batch.
        eval_batch_size: Test images a batch.
        stages: Number of the stage that each client holds; None where all images are there from the start.

    Attributes:
        stages: Number of the current stage by client, from 0.
        milestones: Rounds after which a stage is evaluated: none here, as all images are there from the start.
        stage_rounds: The same rounds, for each stage.

    Raises:
        UserError: If the partition names an image that does not exist.
    """

    milestones: frozenset[int] = frozenset()
    stage_rounds: Sequence[Sequence[int]] = ()

    def __init__(
        self,
        train: Dataset,
        test: Dataset,
        partition: Sequence[Sequence[int]],
        batch_size: int = 10,
        eval_batch_size: int = 32,
        stages: Sequence[int] | None = None,
    ) -> None:
        super().__init__()
        self.train, self.test = train, test
        self.partition = [list(indices) for indices in partition]
        self.batch_size, self.eval_batch_size = batch_size, eval_batch_size
        self.stages = dict(enumerate(stages or [0] * len(self.partition)))
        size = len(train)  # type: ignore[arg-type]
        for number, indices in enumerate(self.partition):
            outside = [index for index in indices if not 0 <= index < size]
            if outside:
                raise UserError(
                    f"client {number} holds image {outside[0]}, but there are {size} training images"
                )

    @property
    def sizes(self) -> dict[int, int]:
        """Number of training images by client."""
        return {client: len(indices) for client, indices in enumerate(self.partition)}

    def at(self, round: int) -> "FederatedDataModule":
        """Returns the data that the clients hold in a round: the same in every round."""
        return self

    def train_dataloader(self) -> DataLoader:
        """Builds a loader of shuffled training batches of all clients together."""
        pooled = sorted(index for indices in self.partition for index in indices)
        return self._loader(self.train, pooled, self.batch_size, shuffle=True)

    def client_loader(self, client: int, generator: torch.Generator, shuffle: bool = True) -> DataLoader:
        """Builds a loader of training batches of one client.

        Args:
            client: Number of the client.
            generator: Source of the order: the same seed gives the same batches.
            shuffle: Whether images come in random order; otherwise in that of the partition.

        Returns:
            A loader; each pass over it draws a new order from ``generator``.

        Raises:
            UserError: If there is no such client or it holds no images.
        """
        return self._loader(self.train, self._indices(client), self.batch_size, shuffle, generator)

    def normal_loader(self, indices: Sequence[int]) -> DataLoader:
        """Builds a loader of normal images in the given order.

        Args:
            indices: Positions in ``train``.
        """
        return self._loader(self.train, indices, self.eval_batch_size, False, torch.Generator())

    def test_dataloader(self) -> DataLoader:
        """Builds a loader of the test set in its order."""
        # Without a generator, a loader draws a number from the global one even if the order is fixed.
        return self._loader(self.test, None, self.eval_batch_size, shuffle=False, generator=torch.Generator())

    def _indices(self, client: int) -> list[int]:
        if not 0 <= client < len(self.partition):
            raise UserError(
                f"client {client} does not exist: the partition has {len(self.partition)} clients"
            )
        if not self.partition[client]:
            raise UserError(
                f"client {client} holds no training images: use fewer clients or a milder partition"
            )
        return self.partition[client]

    def _loader(
        self,
        dataset: Dataset,
        indices: Sequence[int] | None,
        batch_size: int,
        shuffle: bool,
        generator: torch.Generator | None = None,
    ) -> DataLoader:
        return DataLoader(
            dataset if indices is None else Subset(dataset, indices),
            batch_size=batch_size,
            shuffle=shuffle,
            generator=generator,
            collate_fn=as_batch,
        )


def as_batch(batch: Any) -> Any:
    """Returns a batch unchanged: the ``collate_fn`` of loaders whose data set gives whole batches already."""
    return batch
