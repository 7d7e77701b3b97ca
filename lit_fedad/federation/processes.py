"""Building and launching of Fabric processes that train different clients, and gathering of their results."""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.fabric.strategies.ddp import DDPStrategy
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch.multiprocessing.spawn import ProcessRaisedException
from torch.nn import Module

from lit_fedad.core.errors import UserError, one_line

T = TypeVar("T")


_threads_alone: int | None = None
"""Number of threads that a single process would use; None if no processes were launched."""

# Precisions in which weights are not 32-bit. They are refused, because weights are sent in 32 bits, and statistics and
# banks are computed in full precision.
_NOT_SINGLE = ("64-true", "64", "16-true", "bf16-true", "transformer-engine", "transformer-engine-float16")


class ClientsApart(DDPStrategy):
    """A strategy that launches processes as ``ddp`` does, but keeps their models separate.

    DDP would average the gradients of different clients, and hang when clients take different numbers of steps.
    """

    def setup_module(self, module: Module) -> Module:  # type: ignore[override]
        """Returns the module itself, without a DDP wrapper."""
        return module


def make_fabric(
    accelerator: str = "auto",
    devices: int | str = 1,
    precision: Any = "32-true",
    num_nodes: int = 1,
    callbacks: Sequence[object] = (),
) -> Fabric:
    """Builds a Fabric whose processes train different clients.

    `accelerator` is ``cpu``, ``cuda`` or ``auto`` (``cuda`` if it is available), `devices` the number of processes on
    each machine, and `precision` any of Fabric's precisions in which weights stay in single precision.

    Raises:
        UserError: If Fabric does not support the accelerator or precision, or there are too few devices.
    """
    if str(precision) in _NOT_SINGLE:
        raise UserError(
            f"fabric.precision={precision}: weights stay in 32 bits, as they cross;"
            " give 32-true, bf16-mixed or 16-mixed"
        )
    available = "cuda" if torch.cuda.is_available() else "cpu"
    # Fabric's own "auto" would take Apple's MPS, which has no double precision for statistics.
    chosen = available if accelerator == "auto" else accelerator
    settings: dict[str, Any] = {"devices": devices, "num_nodes": num_nodes}
    if num_nodes == 1 and (str(devices) == "1" or (str(devices) == "auto" and available == "cpu")):
        settings = {"devices": 1}
    else:
        fork_server = "forkserver" in multiprocessing.get_all_start_methods()
        start = "popen" if num_nodes > 1 else "forkserver" if fork_server else "spawn"
        settings["strategy"] = ClientsApart(start_method=start)  # type: ignore[arg-type]
    try:
        fabric = Fabric(accelerator=chosen, precision=precision, callbacks=list(callbacks), **settings)
    except (ValueError, TypeError, RuntimeError, MisconfigurationException, ImportError) as error:
        cure = (
            "" if accelerator in ("auto", "cpu") else "; fabric.accelerator=auto takes what this machine has"
        )
        raise UserError(f"fabric: {one_line(error)}{cure}") from error
    if fabric.device.type not in ("cpu", "cuda"):
        raise UserError(f"fabric.accelerator={accelerator}: only cpu and cuda compute all methods; give auto")
    return fabric


def of_this_process(fabric: Fabric, precision: Any) -> Fabric:
    """Builds a Fabric with this process as its only one, on the device that this process has in the given Fabric."""
    device = fabric.device
    devices: Any = 1 if device.type != "cuda" else [device.index]
    return Fabric(accelerator=device.type, devices=devices, precision=precision)


def launched(fabric: Fabric, function: Callable[..., None]) -> Callable[..., None]:
    """Returns a callable that runs a function in every process, with the process's Fabric as its first argument."""
    if fabric.world_size == 1:
        # Around a launched function Lightning patches torch's DataLoader, and does not remove the patch after an error
        # or after a Trainer has run inside. Loaders would become slower with every run and every trial.
        fabric.launch()
        return partial(function, fabric)
    return partial(_launch, fabric, function)


def _launch(fabric: Fabric, function: Callable[..., None], *arguments: Any) -> None:
    """Launches the processes of a Fabric, which call a function; raises a `UserError` of a process again."""
    # The fork server imports what its children need, once for all of them. It imports the package first: otherwise a
    # child would unpickle Lightning's objects first, which fails with a CPU-only torch (see `lit_fedad._compat`).
    multiprocessing.set_forkserver_preload(["lit_fedad", function.__module__])
    try:
        with _reserved_port():
            fabric.launch(partial(_begin, torch.get_num_threads(), function), *arguments)
    except ProcessRaisedException as error:
        # A child process passes on only the text of its traceback, whose last line holds the error.
        last = str(error).strip().splitlines()[-1]
        kind, _, message = last.partition(": ")
        if kind == f"{UserError.__module__}.{UserError.__qualname__}":
            raise UserError(message) from None
        raise


@contextmanager
def _reserved_port() -> Iterator[None]:
    """Keeps a free port for the launched processes in a block, unless the environment gives one.

    Lightning would take the number of a free port, which the first process opens only after its imports. Until then any
    other program could take the port. A bound socket prevents this, and on Linux the first process can listen all the
    same.
    """
    if "MASTER_PORT" in os.environ or sys.platform != "linux":
        yield
        return
    with socket.socket() as reservation:
        reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reservation.bind(("", 0))
        os.environ["MASTER_PORT"] = str(reservation.getsockname()[1])
        try:
            yield
        finally:
            del os.environ["MASTER_PORT"]


def _begin(threads: int, function: Callable[..., None], *arguments: Any) -> None:
    """Calls a function in a launched process, and notes the number of threads, of which Lightning gives it a share."""
    global _threads_alone
    _threads_alone = threads
    function(*arguments)


def shard(sizes: Mapping[int, int], processes: int) -> list[list[int]]:
    """Assigns clients, the largest first, to processes so that each has about the same number of images.

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
    """Gathers results by client on the first process, in client order; empty on the others."""
    if fabric.world_size == 1:
        return dict(sorted(results.items()))
    boxes: list[Any] | None = [None] * fabric.world_size if fabric.global_rank == 0 else None
    dist.gather_object(results, boxes, dst=0)
    merged = {client: result for box in boxes or [] for client, result in box.items()}
    return dict(sorted(merged.items()))


def on_first(fabric: Fabric, function: Callable[[], T]) -> T:
    """Calls a function on the first process, and returns its value on all.

    Raises:
        UserError: On every process, if the function raised one; with a single process, that same error.
    """
    if fabric.world_size == 1:
        return function()
    answer: tuple[Any, str | None] = (None, None)
    if fabric.is_global_zero:
        try:
            answer = function(), None
        except UserError as error:
            answer = None, str(error)
    value, refusal = fabric.broadcast(answer)  # type: ignore[type-var]
    if refusal is not None:
        raise UserError(refusal)
    return typing.cast("T", value)


@contextmanager
def all_cores(fabric: Fabric) -> Iterator[None]:
    """Lets torch use as many threads as a single process would, for a block during which the other processes wait."""
    threads = torch.get_num_threads()
    if fabric.world_size > 1:
        torch.set_num_threads(_threads_alone or threads)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
