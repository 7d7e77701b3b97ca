"""Clients on several processes of Fabric, and their results gathered in client order."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.fabric.strategies.ddp import DDPStrategy
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch.multiprocessing.spawn import ProcessRaisedException
from torch.nn import Module

from lit_fedad.errors import UserError


class ClientsApart(DDPStrategy):
    """Launches processes as ``ddp`` does, but keeps their models apart.

    DDP would average the gradients of different clients, and hang when clients take different numbers of steps.
    """

    def setup_module(self, module: Module) -> Module:  # type: ignore[override]
        """Returns the module itself."""
        return module


def make_fabric(
    accelerator: str = "auto",
    devices: int | str = 1,
    precision: Any = "32-true",
    num_nodes: int = 1,
    callbacks: Sequence[object] = (),
) -> Fabric:
    """Builds a Fabric whose processes train different clients.

    Args:
        accelerator: ``cpu``, ``cuda``, ``mps`` or ``auto``.
        devices: Processes on this machine.
        precision: Any of Fabric's precisions.
        num_nodes: Machines.
        callbacks: See `FederationCallback`.

    Raises:
        UserError: If Fabric does not know the accelerator or precision, or has not as many devices.
    """
    try:
        return _make_fabric(accelerator, devices, precision, num_nodes, list(callbacks))
    except (ValueError, TypeError, RuntimeError, MisconfigurationException) as error:
        raise UserError(f"fabric: {' '.join(str(error).split())}") from error


def _make_fabric(
    accelerator: str, devices: int | str, precision: Any, num_nodes: int, callbacks: list[object]
) -> Fabric:
    alone = num_nodes == 1 and str(devices) in ("1", "auto") and not torch.cuda.is_available()
    if alone or (num_nodes == 1 and str(devices) == "1"):
        return Fabric(accelerator=accelerator, devices=1, precision=precision, callbacks=callbacks)
    start = _start_method() if num_nodes == 1 else "popen"
    strategy = ClientsApart(start_method=start)  # type: ignore[arg-type]
    return Fabric(
        accelerator=accelerator,
        devices=devices,
        precision=precision,
        num_nodes=num_nodes,
        strategy=strategy,
        callbacks=callbacks,
    )


def _start_method() -> str:
    """How processes of one machine start.

    A fork server imports the package once, and before anything else: a spawned child would unpickle Lightning's
    objects first, which fails beside a CPU-only torch (see `lit_fedad._compat`).
    """
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return "spawn"
    multiprocessing.set_forkserver_preload(["lit_fedad"])
    return "forkserver"


def launch(fabric: Fabric, function: Callable[..., None], *arguments: Any) -> None:
    """Runs a function in every process, with the process's own Fabric as its first argument.

    Raises:
        UserError: If a process raised one, also where that was a child process.
    """
    try:
        fabric.launch(function, *arguments)
    except ProcessRaisedException as error:
        # All that crosses from a child process is the text of its traceback.
        last = str(error).strip().splitlines()[-1]
        kind, _, message = last.partition(": ")
        if kind == f"{UserError.__module__}.{UserError.__qualname__}":
            raise UserError(message) from None
        raise


def shard(sizes: Mapping[int, int], processes: int) -> list[list[int]]:
    """Assigns clients to processes so that each has about the same number of images, largest client first.

    Args:
        sizes: Images by client.
        processes: Number of processes.

    Returns:
        Clients of each process, ascending. A client stays with its process for the whole run.

    Example:
        >>> shard({0: 10, 1: 70, 2: 30, 3: 40}, 2)
        [[0, 1], [2, 3]]
    """
    shards: list[list[int]] = [[] for _ in range(processes)]
    loads = [0] * processes
    for client in sorted(sizes, key=lambda c: (-sizes[c], c)):
        target = loads.index(min(loads))
        shards[target].append(client)
        loads[target] += sizes[client]
    return [sorted(clients) for clients in shards]


def gather(fabric: Fabric, results: dict[int, Any]) -> dict[int, Any]:
    """Gathers results by client on the first process, in client order; returns nothing elsewhere."""
    if fabric.world_size == 1:
        return dict(sorted(results.items()))
    boxes: list[Any] | None = [None] * fabric.world_size if fabric.global_rank == 0 else None
    dist.gather_object(results, boxes, dst=0)
    merged = {client: result for box in boxes or [] for client, result in box.items()}
    return dict(sorted(merged.items()))


@contextmanager
def all_cores(fabric: Fabric) -> Iterator[None]:
    """Gives the first process every core of the machine while the others wait for it."""
    threads = torch.get_num_threads()
    if fabric.world_size > 1:
        torch.set_num_threads(os.cpu_count() or threads)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
