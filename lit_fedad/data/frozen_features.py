"""Frozen features of whole images, computed once for each set of images and kept on disk in half precision."""

import hashlib
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from lit_fedad.contracts.randomness import seeded
from lit_fedad.core.errors import UserError
from lit_fedad.core.files import atomic
from lit_fedad.data.datamodule import Batch, BatchDataset, Targets
from lit_fedad.data.feature_cache import locked, save_tensors
from lit_fedad.data.labelled import LabelledTargets

_BATCH = 128

Encode = Callable[[Tensor], Tensor]
"""Maps images in [0, 1] [B, 3, S, S] to features [B, C]."""


class FrozenFeatures(NamedTuple):
    """Features of images.

    Attributes:
        plain: Of the images as they are, float16 [N, C].
        views: Of views of the images, drawn at random or turned, float16 [N, V, C]; None where there are none.
    """

    plain: Tensor
    views: Tensor | None = None


def frozen_features(
    number: int,
    read: Callable[[range], Tensor],
    encode: Encode,
    draw: Callable[[Tensor], Tensor],
    turns: Sequence[int],
    file: Path | None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> FrozenFeatures:
    """Computes the features of images, or reads what was computed before.

    Args:
        number: Number of images N.
        read: Reads the images at some positions, in [0, 1] [B, 3, S, S].
        encode: Computes features.
        draw: Draws a random view of each image of a batch.
        turns: Rotation of each view in quarter turns [V]; empty for no views. Views belong to the images: they are the
            same in runs of any seed.
        file: File that keeps them; None to keep nothing.
        progress: Called with the number of images done and of all images.

    Raises:
        UserError: If features do not fit half precision, or the file cannot be written.
    """
    if file is not None and (stored := _read_stored(file, number, len(turns))) is not None:
        return stored
    plain, views = torch.empty(0), torch.empty(0)
    with seeded(0, "frozen views"):
        for start in range(0, number, _BATCH):
            positions = range(start, min(start + _BATCH, number))
            pixels = read(positions)
            features = encode(pixels)
            if start == 0:  # the largest arrays of a run are filled in place, never copied
                plain = torch.empty(number, features.shape[1], dtype=torch.float16)
                views = torch.empty(number, len(turns), features.shape[1], dtype=torch.float16)
            plain[start : positions.stop] = features
            for view, turn in enumerate(turns):
                views[start : positions.stop, view] = encode(draw(torch.rot90(pixels, turn, (2, 3))))
            if not all(array[start : positions.stop].isfinite().all() for array in (plain, views)):
                raise UserError(
                    "features do not fit half precision, in which they are kept: choose another backbone"
                )
            progress(positions.stop, number)
    computed = FrozenFeatures(plain, views if turns else None)
    if file is not None:
        entries = {name: entry for name, entry in computed._asdict().items() if entry is not None}
        with locked(file.parent), atomic(file, alone=True) as partial:
            save_tensors(entries, partial)
    return computed


def features_key(images: Tensor | Sequence[bytes], *settings: object) -> str:
    """Returns the name of the features of images under some settings: a hash of both.

    Args:
        images: The images [N, 3, S, S], or a digest of each.
        *settings: What else decides the features.
    """
    digest = hashlib.sha256(repr((len(images), settings)).encode())
    if isinstance(images, Tensor):
        digest.update(repr(tuple(images.shape)).encode())
        digest.update(images.contiguous().numpy().data)
    else:
        digest.update(b"".join(images))
    return digest.hexdigest()[:32]


class FrozenDataset(BatchDataset):
    """Data set whose batches have frozen features in the place of images.

    Args:
        features: Features of N images.
        targets: Labels and, where there are any, masks and categories of these images, by a list of positions.
        turned: Features of the images turned by 90, 180 and 270 degrees, float16 [N, 3, C]; None where no score
            needs them.
    """

    def __init__(
        self, features: FrozenFeatures, targets: Targets | LabelledTargets, turned: Tensor | None = None
    ) -> None:
        self._features, self._targets, self._turned = features, targets, turned

    def __len__(self) -> int:
        return len(self._features.plain)

    def __getitems__(self, indices: Sequence[int]) -> Batch:
        """Returns a whole batch, with ``views`` and ``turned`` ([B, 4, C], all four rotations) where there are some."""
        batch = self._targets[indices]
        batch["image"] = self._features.plain[batch["index"]].float()
        if self._turned is not None:
            rotations = self._turned[batch["index"]].float()
            batch["turned"] = torch.cat([batch["image"][:, None], rotations], dim=1)
        if self._features.views is not None:
            batch["views"] = self._features.views[batch["index"]]
        return batch


def _read_stored(file: Path, number: int, views: int) -> FrozenFeatures | None:
    """Reads features; None where there are none, or the file is damaged."""
    if not file.exists():
        return None
    try:
        entries = load_file(file)
        features = FrozenFeatures(entries["plain"], entries.get("views"))
        stored_views = features.views.shape[1] if features.views is not None else 0
        if len(features.plain) != number or stored_views != views or not features.plain.isfinite().all():
            raise ValueError("of another form")
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        warnings.warn(f"{file}: damaged ({error}); features are computed again", stacklevel=2)
        return None
    return features
