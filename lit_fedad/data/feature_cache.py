"""Frozen features, computed once per image and kept on disk in half precision."""

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from lit_fedad.core.errors import UserError
from lit_fedad.data.content import content_hashes
from lit_fedad.data.datamodule import Batch, BatchDataset, Targets
from lit_fedad.data.row_store import RowStore, Shapes
from lit_fedad.data.sample import Sample
from lit_fedad.data.transform import ImageTransform

HASHES = "hashes.json"
"""Name of the file of known hashes, in the folder of all caches."""

_FORMAT = 1  # raise it when the same images, transform and backbone begin to give other rows


class CachedFeatures(BatchDataset):
    """Feature pyramids read from the rows of a cache, whole batches at once.

    Args:
        file: The file of rows.
        shapes: ``(C_l, H_l, W_l)`` of each layer.
        rows: The row of each sample.
        targets: Labels and masks of the samples.
    """

    def __init__(self, file: Path, shapes: Shapes, rows: Sequence[int], targets: Targets) -> None:
        self._shapes, self._targets = shapes, targets
        self._rows = np.asarray(rows, dtype=np.int64)
        ends = np.cumsum([math.prod(shape) for shape in shapes], dtype=np.int64).tolist()
        self._spans = list(zip([0, *ends], ends, strict=False))
        self._data = np.empty((0, 0), np.float16)
        if len(self._rows):
            self._data = np.memmap(
                file, np.float16, "r", shape=(int(self._rows.max()) + 1, self._spans[-1][1])
            )

    def __len__(self) -> int:
        return len(self._rows)

    def __getitems__(self, indices: Sequence[int]) -> Batch:
        """Returns a whole batch."""
        batch = self._targets[indices]
        rows = self._rows[batch["index"].numpy()]
        batch["pyramid"] = tuple(
            torch.from_numpy(self._data[rows, start:end]).float().view(-1, *shape)
            for (start, end), shape in zip(self._spans, self._shapes, strict=True)
        )
        return batch


class FeatureCache:
    """Cache of the features that a frozen extractor gives for images.

    Rows are found by the bytes of an image: copies and renamed files are computed once. Several processes may
    fill the same folder at the same time: one computes, the others wait and read.

    Args:
        folder: Folder of all caches; each pair of transform and extractor gets a folder of its own in it.
        transform: Transform from files to images.
        extractor: Frozen model: images ``[B, 3, S, S]`` to one tensor ``[B, C_l, H_l, W_l]`` a layer.
        fingerprint: Identifies the extractor: it changes whenever its features do.

    Attributes:
        folder: The folder of this transform and extractor.
    """

    def __init__(
        self,
        folder: Path,
        transform: ImageTransform,
        extractor: Callable[[Tensor], Sequence[Tensor]],
        fingerprint: str,
    ) -> None:
        self._transform, self._extractor = transform, extractor
        identity = {"format": _FORMAT, "transform": transform.fingerprint, "backbone": fingerprint}
        self.folder = Path(folder) / hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:16]
        self._store = RowStore(self.folder, identity)
        self._hashes = Path(folder) / HASHES
        self._image: dict[Path, bytes] = {}

    def fill(
        self,
        samples: Sequence[Sample],
        batch_size: int = 16,
        progress: Callable[[int, int], None] | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        """Computes the features that are missing or damaged.

        Args:
            samples: The samples whose features will be read.
            batch_size: Images a call of the extractor.
            progress: Called after each batch with the number of images done and of images to do.
            device: Device of the extractor.

        Raises:
            UserError: If an image cannot be read, its features do not fit half precision, or the folder
                cannot be written or has too little room.
        """
        paths = dict.fromkeys(sample.path for sample in samples)
        with self._store.locked():
            self._image |= content_hashes(paths, self._hashes)
            path_of = {self._image[path]: path for path in paths}
            missing = self._store.missing(path_of)
            if not missing:
                return
            shapes = self._shapes(path_of[missing[0]], device)
            if self._store.shapes not in (None, shapes):
                self._store.clear(f"is for shapes {self._store.shapes}, but the backbone gives {shapes}")
                missing = list(path_of)
            self._store.prepare(shapes, len(missing))
            batches = [missing[start : start + batch_size] for start in range(0, len(missing), batch_size)]
            done = 0
            for batch, images in zip(batches, self._decode(batches, path_of), strict=True):
                rows = self._extract(images.to(device), batch_size)
                finite = rows.isfinite().all(dim=1)
                if not finite.all():
                    path = path_of[batch[int(finite.int().argmin())]]
                    raise UserError(f"features of {path} do not fit half precision: set cache.enabled=false")
                self._store.write(batch, rows.numpy())
                done += len(batch)
                if progress is not None:
                    progress(done, len(missing))

    def dataset(
        self, samples: Sequence[Sample], with_masks: bool = False, products: Sequence[str] = ()
    ) -> CachedFeatures:
        """Returns the features of samples that `fill` has seen.

        Args:
            samples: The samples.
            with_masks: Whether batches carry masks.
            products: Names of the products that the task tells apart.

        Raises:
            ValueError: If `fill` has not seen one of them.
        """
        unseen = [sample.path for sample in samples if sample.path not in self._image]
        if unseen:
            raise ValueError(f"no features of {unseen[0]}: call fill with these samples first")
        rows = [self._store.row[self._image[sample.path]] for sample in samples]
        targets = Targets(samples, self._transform, with_masks, products)
        return CachedFeatures(self._store.rows_file, self._store.shapes or (), rows, targets)

    @torch.inference_mode()
    def _shapes(self, path: Path, device: torch.device | str) -> Shapes:
        pyramid = self._extractor(self._transform.image(path)[None].to(device))
        return tuple(tuple(features.shape[1:]) for features in pyramid)

    @torch.inference_mode()
    def _extract(self, images: Tensor, batch_size: int) -> Tensor:
        """Rows of a batch of images, float16 ``[B, row]``."""
        # The last bits of a convolution can depend on the size of the batch. With full batches only, a row
        # does not depend on how many others are missing, and one made again is the same bit for bit.
        filling = images[-1:].expand(batch_size - len(images), -1, -1, -1)
        pyramid = self._extractor(torch.cat([images, filling]))
        return torch.cat([features[: len(images)].flatten(1) for features in pyramid], dim=1).half().cpu()

    def _decode(self, batches: list[list[bytes]], path_of: dict[bytes, Path]) -> Iterator[Tensor]:
        """Reads images in threads, one batch ahead of the extractor."""
        with ThreadPoolExecutor(max_workers=min(4, os.cpu_count() or 1)) as pool:

            def submit(batch: list[bytes]) -> list[Future[Tensor]]:
                return [pool.submit(self._transform.image, path_of[image]) for image in batch]

            ahead = submit(batches[0])
            for following in [*batches[1:], []]:
                current, ahead = ahead, submit(following)
                yield torch.stack([image.result() for image in current])
