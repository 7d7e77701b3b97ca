"""Helpers that control how torch computes: batch by batch, on one thread, or in full precision."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

import lightning as L
import torch
from lightning.fabric import Fabric
from torch import Tensor, nn

from lit_fedad.core.bounds import below_one
from lit_fedad.core.errors import UserError

T = TypeVar("T")


def map_batches(
    module: L.LightningModule, loader: Iterable[Any], function: Callable[[Mapping[str, Any]], T]
) -> Iterator[T]:
    """Applies a function to every batch of a loader, moved to a module's device.

    Args:
        module: Module that defines the device.
        loader: Batches.
        function: Called with each batch.

    Yields:
        The function's values, in the order of the batches.
    """
    for batch in loader:
        yield function(module.transfer_batch_to_device(batch, module.device, 0))


@contextmanager
def one_thread() -> Iterator[None]:
    """Limits torch to one thread for a block, because the order of sums depends on the number of threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def check_optimizer(key: str, build: Callable[[list[nn.Parameter]], torch.optim.Optimizer]) -> None:
    """Builds an optimiser of a single weight, so that its settings are refused before anything is trained.

    Args:
        key: Key of the optimiser, for the error message.
        build: Builds the optimiser, given weights.

    Raises:
        UserError: If torch refuses a setting, or the momentum is not in [0, 1).
    """
    try:
        optimizer = build([nn.Parameter(torch.zeros(1))])
    except ValueError as error:  # raised by torch's optimisers for a setting out of range
        raise UserError(f"{key}: {error}") from error
    below_one(key, momentum=optimizer.defaults.get("momentum"))


def set_up(optimizer: torch.optim.Optimizer, fabric: Fabric) -> torch.optim.Optimizer:
    """Registers an optimiser with Fabric, so that in 16-mixed it divides gradients by the scale of the loss."""
    ready = fabric.setup_optimizers(optimizer)
    assert isinstance(ready, torch.optim.Optimizer)
    return ready


def full_precision(tensor: Tensor) -> AbstractContextManager[object]:
    """Disables autocast on a tensor's device for a block; tensors that are already in half precision stay in it.

    Args:
        tensor: A tensor that the block computes with.

    Example:
        >>> with torch.autocast("cpu", dtype=torch.bfloat16), full_precision(torch.eye(2)):
        ...     (torch.eye(2) @ torch.eye(2)).dtype
        torch.float32
    """
    if torch.compiler.is_exporting():  # exports have no autocast, and torch refuses graphs with such a block
        return nullcontext()
    return torch.autocast(tensor.device.type, enabled=False)
