"""A function over all batches of a loader, on a module's device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import lightning as L

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
