"""A hash of what clients hold: the partition, and the images behind its indices."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path

from lit_fedad.data.content import content_hashes
from lit_fedad.data.image_files import images_in
from lit_fedad.data.labelled import Images, LabelledSet
from lit_fedad.data.partition import Partition
from lit_fedad.data.sample import Sample


def data_digest(images: Images, partition: Partition, memo: Path | None = None) -> str:
    """Hashes a partition and its images: pixels that lie in memory; product, path and content of files and masks.

    Returns:
        32 hexadecimal digits, which do not depend on the folder of the data.

    Raises:
        UserError: If an image file is gone.
    """
    digest = hashlib.sha256()
    for owner, indices in partition.index_lists():
        digest.update(json.dumps([owner, indices]).encode())
    digest.update(json.dumps([images.name, images.categories, partition.schedule]).encode())
    for part in (
        _in_memory(images) if isinstance(images, LabelledSet) else _on_disk(memo, images.train, images.test)
    ):
        digest.update(part)
    return digest.hexdigest()[:32]


def _in_memory(images: LabelledSet) -> Iterator[memoryview | bytes]:
    for tensor in (images.train_images, images.train_labels, images.test_images, images.test_labels):
        yield json.dumps(list(tensor.shape)).encode()
        yield tensor.flatten().numpy().data


def _on_disk(memo: Path | None, *parts: Sequence[Sample]) -> Iterator[bytes]:
    by_product: dict[str, list[str]] = {}
    for sample in chain(*parts):
        by_product.setdefault(sample.category, []).append(str(sample.path.absolute().parent))
    # What lies above a product's folder differs between machines.
    home = {product: os.path.commonpath(folders) for product, folders in by_product.items()}
    files = [file for sample in chain(*parts) for file in (sample.path, *_mask_files(sample.mask))]
    hashes = content_hashes(files, memo)
    for samples in parts:
        for sample in samples:
            place = sample.path.absolute().relative_to(home[sample.category]).as_posix()
            content = [hashes[file].hex() for file in (sample.path, *_mask_files(sample.mask))]
            yield json.dumps([sample.category, sample.defect, place, *content]).encode()


def _mask_files(mask: Path | None) -> list[Path]:
    """The files of a mask, which may be a folder with one for each region."""
    if mask is None:
        return []
    return images_in(mask) if mask.is_dir() else [mask]
