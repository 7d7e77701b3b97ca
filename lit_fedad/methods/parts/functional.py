"""Tasks as functions: of other weights, in evaluation mode, over whole loaders."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import lightning as L
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.data import DataLoader

from lit_fedad.contracts import Task

T = TypeVar("T")

_CHUNK = 500  # images that a model looks at at once


class _Caller(nn.Module):
    def __init__(self, task: Task) -> None:
        super().__init__()
        self.task = task

    def forward(self, function: Callable[[Task], Any]) -> Any:
        return function(self.task)


def with_weights(task: Task, weights: Mapping[str, Tensor], function: Callable[[Task], T]) -> T:
    """Calls a function of a task that has other weights for the time of the call; gradients reach these.

    Args:
        task: The task; its own weights are untouched.
        weights: Some or all entries of its state, by name.
        function: What is called.
    """
    return functional_call(_Caller(task), {f"task.{n}": w for n, w in weights.items()}, (function,))


@contextmanager
def evaluating(task: Task) -> Iterator[None]:
    """Switches a task to evaluation for a block: normalisation layers use, and leave, their running statistics."""
    training = task.training
    task.eval()
    try:
        yield
    finally:
        task.train(training)


def map_batches(
    module: L.LightningModule, loader: DataLoader, function: Callable[[Mapping[str, Any]], T]
) -> Iterator[T]:
    """Calls a function of every batch of a loader, moved to a module's device.

    Args:
        module: Names the device.
        loader: Batches.
        function: Called with each batch.

    Yields:
        Its values, in the order of the batches.
    """
    for batch in loader:
        yield function(module.transfer_batch_to_device(batch, module.device, 0))


@torch.no_grad()
def look(
    task: Task, weights: Mapping[str, Tensor], images: Tensor, function: Callable[[Tensor], T]
) -> list[T]:
    """What a task says of images, in evaluation mode and a few hundred at a time.

    Args:
        task: The task; its own weights are untouched.
        weights: What it has in their place, some or all entries of its state; none for its own.
        images: On any device [n, C, H, W].
        function: Called with the images of each part, on the task's device.

    Returns:
        Its answers, in the order of the images.
    """
    given = {name: entry.to(task.device) for name, entry in weights.items()}
    with evaluating(task):
        return with_weights(
            task, given, lambda _: [function(part.to(task.device)) for part in images.split(_CHUNK)]
        )


@contextmanager
def frozen(task: Task) -> Iterator[None]:
    """Keeps gradients out of a task's weights for a block: they flow through it, to what it looks at."""
    parameters = list(trainable(task).values())
    for parameter in parameters:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in parameters:
            parameter.requires_grad_(True)


def trainable(task: Task) -> dict[str, nn.Parameter]:
    """The parameters that training changes, by name."""
    return {name: p for name, p in task.named_parameters() if p.requires_grad}


def pooled(features: Tensor) -> Tensor:
    """One vector an image [B, C]: the mean over positions, where features have any."""
    return features if features.dim() == 2 else features.mean(1)
