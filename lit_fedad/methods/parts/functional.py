"""Functional calls of tasks: with other weights, in evaluation mode, in chunks."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from lit_fedad.contracts import Task
from lit_fedad.core.errors import UserError


def divergence(student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """Computes the batch mean of ``KL(softmax(teacher / T) || softmax(student / T))``, without the usual factor T^2.

    Args:
        student: The student's logits [B, K].
        teacher: The teacher's logits [B, K].
        temperature: Temperature T.
    """
    return F.kl_div(
        (student / temperature).log_softmax(1),
        (teacher / temperature).log_softmax(1),
        log_target=True,
        reduction="batchmean",
    )


def take_step(optimizer: torch.optim.Optimizer, loss: Tensor, rate: str) -> float:
    """Takes a step of an optimiser, without the scaling of the loss that ``16-mixed`` applies, and returns the loss.

    Args:
        optimizer: The optimiser.
        loss: The loss.
        rate: Key of the learning rate in the configuration, for the error message.

    Raises:
        UserError: If the loss is not finite.
    """
    if not torch.isfinite(loss):
        raise UserError(f"training on the server diverged; lower {rate}")
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    return float(loss.detach())


T = TypeVar("T")

_CHUNK = 500  # images per forward pass


class _Caller(nn.Module):
    def __init__(self, task: Task) -> None:
        super().__init__()
        self.task = task

    def forward(self, function: Callable[[Task], Any]) -> Any:
        return function(self.task)


def with_weights(task: Task, weights: Mapping[str, Tensor], function: Callable[[Task], T]) -> T:
    """Calls a function with a task whose weights are replaced during the call; gradients reach the given weights.

    Args:
        task: The task; its own weights do not change.
        weights: Some or all entries of the task's state, by name.
        function: The function, of the task.
    """
    return functional_call(_Caller(task), {f"task.{n}": w for n, w in weights.items()}, (function,))


@contextmanager
def evaluating(task: Task) -> Iterator[None]:
    """Sets a task to evaluation mode for a block: normalisation layers use running statistics without updates."""
    training = task.training
    task.eval()
    try:
        yield
    finally:
        task.train(training)


@torch.no_grad()
def apply_in_chunks(
    task: Task, weights: Mapping[str, Tensor], images: Tensor, function: Callable[[Tensor], T]
) -> list[T]:
    """Applies a function to chunks of images, with a task in evaluation mode.

    Args:
        task: The task; its own weights do not change.
        weights: Entries of the task's state to replace; empty for its own weights.
        images: Images on any device [n, C, H, W].
        function: The function, of each chunk of images on the task's device.

    Returns:
        The function's values by chunk, in the order of the images.
    """
    moved = {name: entry.to(task.device) for name, entry in weights.items()}
    with evaluating(task):
        return with_weights(
            task, moved, lambda _: [function(part.to(task.device)) for part in images.split(_CHUNK)]
        )


@contextmanager
def frozen(task: Task) -> Iterator[None]:
    """Disables gradients of a task's weights for a block; gradients still reach its inputs."""
    parameters = list(trainable(task).values())
    for parameter in parameters:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in parameters:
            parameter.requires_grad_(True)


def draw_weights(module: nn.Module) -> None:
    """Draws the weights of all layers anew, from torch's global generator, by each layer's own initialisation."""
    for layer in module.modules():
        if callable(reset := getattr(layer, "reset_parameters", None)):
            reset()


AnyTask = TypeVar("AnyTask", bound=Task)


def copied(task: AnyTask) -> AnyTask:
    """Copies a task; copy and task share frozen backbones, in whatever submodule they are."""
    backbones = [module for name, module in task.named_modules() if name.rpartition(".")[2] == "backbone"]
    frozen_ones = [b for b in backbones if not any(p.requires_grad for p in b.parameters())]
    return deepcopy(task, {id(backbone): backbone for backbone in frozen_ones})


def trainable(task: Task) -> dict[str, nn.Parameter]:
    """Returns the trainable parameters of a task, by name."""
    return {name: p for name, p in task.named_parameters() if p.requires_grad}


def gathered(loader: Iterable[Mapping[str, Tensor]], *names: str) -> tuple[Tensor, ...]:
    """Concatenates the named entries of all batches of a loader."""
    batches = list(loader)
    return tuple(torch.cat([batch[name] for batch in batches]) for name in names)


def pooled(features: Tensor) -> Tensor:
    """Averages features [B, P, C] over positions to one vector per image [B, C]; returns features [B, C] unchanged."""
    return features if features.dim() == 2 else features.mean(1)
