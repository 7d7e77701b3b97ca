"""Frozen features of images in memory: computed once, kept on disk in half precision."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor
from torch.utils.data import Dataset

from lit_fedad.contracts.randomness import seeded
from lit_fedad.data.datamodule import Batch, unbatched
from lit_fedad.errors import UserError

TURNS = 4
"""Rotations by multiples of 90 degrees."""

_BATCH = 128

Encode = Callable[[Tensor], Tensor]
"""Maps images in [0, 1] [B, 3, S, S] to features [B, C]."""


class FrozenFeatures(NamedTuple):
    """Features of images.

    Attributes:
        plain: Of the images as they are, float16 [N, C].
        views: Of random views of every rotation of the images, float16 [N, 4, V, C]; None where there are none.
    """

    plain: Tensor
    views: Tensor | None = None


def frozen_features(
    images: Tensor,
    encode: Encode,
    draw: Callable[[Tensor], Tensor],
    views: int,
    seed: int,
    file: Path | None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> FrozenFeatures:
    """Computes the features of images, or reads what was computed before.

    Args:
        images: uint8 [N, 3, S, S].
        encode: Computes features.
        draw: Draws a random view of each image of a batch.
        views: Views of every rotation V; 0 for none.
        seed: Seed of the views.
        file: File that keeps them; None to keep nothing.
        progress: Called with numbers of images, done and in all.

    Raises:
        UserError: If the file cannot be written.
    """
    if file is not None and (known := _read(file, len(images), views)) is not None:
        return known
    plain, seen = [], []
    with seeded(seed, "frozen views"):
        for start in range(0, len(images), _BATCH):
            pixels = images[start : start + _BATCH].float() / 255
            plain.append(encode(pixels).half().cpu())
            if views:
                turned = [torch.rot90(pixels, turn, (2, 3)) for turn in range(TURNS)]
                drawn = [torch.stack([encode(draw(copy)) for _ in range(views)], 1) for copy in turned]
                seen.append(torch.stack(drawn, 1).half().cpu())
            progress(min(start + _BATCH, len(images)), len(images))
    found = FrozenFeatures(torch.cat(plain), torch.cat(seen) if views else None)
    if file is not None:
        _write(file, found)
    return found


def features_key(images: Tensor, *settings: object) -> str:
    """Returns the name of the features of images [N, 3, S, S] under some settings: a hash of both."""
    digest = hashlib.sha256(repr((tuple(images.shape), settings)).encode())
    digest.update(images.contiguous().numpy().data)
    return digest.hexdigest()[:32]


class FrozenDataset(Dataset):
    """Features in the place of images, with their labels.

    Args:
        features: Features of N images.
        labels: int64 [N].
        normal_classes: Number of the classes that are normal, where classes stand behind normal and anomalous; None
            where labels are classes.
    """

    def __init__(self, features: FrozenFeatures, labels: Tensor, normal_classes: int | None = None) -> None:
        self._features, self._labels, self._normal_classes = features, labels, normal_classes

    def __len__(self) -> int:
        return len(self._labels)

    def __getitems__(self, indices: Sequence[int]) -> Batch:
        """Returns a whole batch; ``views`` only where there are some."""
        index = torch.as_tensor(indices, dtype=torch.int64)
        batch = Batch(image=self._features.plain[index].float(), label=self._labels[index], index=index)
        if self._features.views is not None:
            batch["views"] = self._features.views[index].float()
        if self._normal_classes is not None:
            batch["category"] = batch["label"]
            batch["label"] = (batch["category"] >= self._normal_classes).long()
        return batch

    def __getitem__(self, index: int) -> Batch:
        """Returns one item, without the batch dimension."""
        return unbatched(self.__getitems__([index]))


def _read(file: Path, number: int, views: int) -> FrozenFeatures | None:
    """Reads features; None where there are none, or the file is damaged."""
    if not file.exists():
        return None
    try:
        held = safetensors.torch.load_file(file)
        found = FrozenFeatures(held["plain"], held.get("views"))
    except (SafetensorError, OSError, KeyError) as error:
        warnings.warn(f"{file}: damaged ({error}); features are computed again", stacklevel=2)
        return None
    drawn = found.views.shape[2] if found.views is not None else 0
    if len(found.plain) != number or drawn != views or not found.plain.isfinite().all():
        warnings.warn(f"{file}: damaged (of another form); features are computed again", stacklevel=2)
        return None
    return found


def _write(file: Path, found: FrozenFeatures) -> None:
    held = {name: entry.contiguous() for name, entry in found._asdict().items() if entry is not None}
    part = file.with_name(f".{file.name}.part")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        safetensors.torch.save_file(held, part)
        part.replace(file)
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise UserError(
            f"feature cache {file.parent} cannot be used ({reason}): choose another folder (cache.folder=...)"
            " or compute features each time (cache.enabled=false)"
        ) from error
