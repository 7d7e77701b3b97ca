"""Frozen features of a run's images in memory, in the place of their pixels."""

from __future__ import annotations

from pathlib import Path

import torch
from lightning.fabric import Fabric
from torch import Tensor

from lit_fedad.contracts import Task
from lit_fedad.data.frozen_features import FrozenDataset, FrozenFeatures, features_key, frozen_features
from lit_fedad.data.labelled import LabelledSet
from lit_fedad.data.semantic import SemanticSet
from lit_fedad.federation.processes import all_cores
from lit_fedad.models.frozen_encoder import FrozenEncoder
from lit_fedad.report.console import Display
from lit_fedad.tasks.contrastive import Contrastive


def frozen_encoder(task: Task) -> FrozenEncoder | None:
    """Returns the task's frozen encoder; None where its encoder sees pixels."""
    encoder = getattr(task, "encoder", None)
    return encoder if isinstance(encoder, FrozenEncoder) else None


def frozen_datasets(
    images: LabelledSet, task: Task, folder: Path | None, seed: int, fabric: Fabric, display: Display
) -> tuple[FrozenDataset, FrozenDataset]:
    """Computes the features of training and test images, or reads those that are known.

    Args:
        images: The images.
        task: A task with a frozen encoder.
        folder: Folder of known features; None for none.
        seed: Seed of random views; without views features are the same for all seeds.
        fabric: Device and processes; the first fills the folder.
        display: Shows progress.
    """
    encoder = frozen_encoder(task)
    assert encoder is not None
    encoder.to(fabric.device)
    mean, std = (
        torch.tensor(values).view(-1, 1, 1).to(fabric.device) for values in (images.mean, images.std)
    )

    def encode(pixels: Tensor) -> Tensor:
        return encoder.features((pixels.to(fabric.device) - mean) / std)

    def compute(pixels: Tensor, views: int, name: str) -> FrozenFeatures:
        draw = task.draw if isinstance(task, Contrastive) else torch.nn.Identity()
        settings = (
            encoder.backbone.fingerprint,
            encoder.size,
            views,
            vars(draw) if views else (),
            seed if views else 0,
        )
        file = folder / f"{features_key(pixels, *map(str, settings))}.safetensors" if folder else None
        with all_cores(fabric), display.progress(f"Frozen features, {name}") as progress:
            return frozen_features(pixels, encode, draw, views, seed, file, progress)

    def both() -> tuple[FrozenFeatures, FrozenFeatures]:
        views = encoder.views if isinstance(task, Contrastive) else 0
        return compute(images.train_images, views, "training"), compute(images.test_images, 0, "test")

    found = both() if fabric.is_global_zero or folder is None else None
    fabric.barrier()
    train, test = found or both()
    normal = images.normal_classes if isinstance(images, SemanticSet) else None
    return (
        FrozenDataset(train, images.train_labels, normal),
        FrozenDataset(test, images.test_labels, normal),
    )


@torch.no_grad()
def frozen_public(public: Tensor, task: Contrastive) -> Tensor:
    """Computes the frozen features [P, C] of public images uint8 [P, 3, S, S], which a server keeps instead of them."""
    encoder = frozen_encoder(task)
    assert encoder is not None
    parts = [encoder.features((part / 255 - task.mean) / task.std) for part in public.split(128)]
    return torch.cat(parts)
