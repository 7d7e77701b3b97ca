"""A client's number of images of each class, as it is sent, declared and checked."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lit_fedad.contracts import TensorSpec, Update
from lit_fedad.core.errors import UserError

COUNTS = "label_counts"


def counts_spec(classes: int) -> TensorSpec:
    """Declares a number of images for each of K classes, int64 [K]."""
    return TensorSpec((classes,), torch.int64, low=0, counted=True)


def count_labels(loader: DataLoader, classes: int) -> Tensor:
    """Counts a client's images of each class, int64 [K]."""
    return torch.cat([batch["label"] for batch in loader]).bincount(minlength=classes)


def check_counts(update: Update) -> None:
    """Checks that a client counts as many images as it has.

    Raises:
        UserError: If it counts more or fewer.
    """
    counted = int(update.message[COUNTS].sum())
    if counted != update.num_samples:
        raise UserError(f"the client counts {counted} images of its {update.num_samples}")
