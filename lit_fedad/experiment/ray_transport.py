"""The transport to clients that Ray workers play, on this machine or on a cluster."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from lightning.fabric import Fabric

from lit_fedad.contracts import Context
from lit_fedad.core.bounds import at_least
from lit_fedad.core.config import Config
from lit_fedad.core.errors import UserError, first_line
from lit_fedad.core.extras import require
from lit_fedad.experiment.run import Run
from lit_fedad.federation.client_pool import ClientPool, State
from lit_fedad.federation.client_runner import ClientResult
from lit_fedad.federation.local_transport import LocalTransport
from lit_fedad.federation.processes import make_fabric
from lit_fedad.federation.transport import Outcome, Sent
from lit_fedad.report.console import Display


@dataclass(frozen=True)
class Simulation:
    """What plays the clients.

    Attributes:
        workers: Number of processes, above 0; each plays one client at a time.
        address: Of a Ray cluster, such as ``auto``; None for workers on this machine alone.
        cpus: Cores of each, by which Ray places them.
        gpus: Devices of each; a fraction lets several share one.

    Raises:
        UserError: If a number is out of range, or Ray is missing.
    """

    workers: int
    address: str | None = None
    cpus: float = 1
    gpus: float = 0

    def __post_init__(self) -> None:
        at_least("simulation", 0, workers=self.workers, cpus=self.cpus, gpus=self.gpus)
        require("simulation", "simulation.workers")


Builder = Callable[[Fabric, Config, Display], Run]
"""Builds all parts of a run in one process."""

_PATIENCE = 300
"""Seconds for which clients wait while no worker is left."""


class RayTransport(LocalTransport):
    """The transport to clients that Ray workers play; what is asked of clients is answered in this process.

    A worker builds the run's data and live client once. The server's bytes and the client's personal state go there;
    the client's bytes and its new state come back. A `LocalTransport` plays the exchange there, so digits are those of
    one process with as many threads. A worker that ends, with its machine or alone, is a failure of the client that it
    played; it is started again wherever there is room, and plays no client until it is there.
    """

    def __init__(self, config: Config, simulation: Simulation, build: Builder, here: LocalTransport) -> None:
        super().__init__(here.runner, here.data, here.pool, here.mine, here.evaluator, here.sampler)
        self.config, self.simulation, self.build = config, simulation, build
        self._workers: list[Any] = []
        self._returning: dict[Any, Any] = {}

    def play(
        self, sent: Sent, scored: Collection[int], envelopes: Mapping[int, bytes] | None = None
    ) -> Outcome[ClientResult]:
        """Plays an exchange with every client that a message is for; see `Transport.play`."""
        import ray

        _, context, blobs = sent
        self._workers = self._workers or self._start()
        free = [worker for worker in self._workers if worker not in self._returning.values()]
        busy, waiting = dict[Any, tuple[int, Any]](), sorted(blobs)
        # Equal messages are packed once, and lie in Ray's store once.
        stored = {id(blob): ray.put(blob) for blob in {id(blob): blob for blob in blobs.values()}.values()}
        outcome: Outcome[ClientResult] = Outcome({}, {})
        stages = self.data.at(context.round).stages
        while waiting or busy:
            while waiting and free:
                number, worker = waiting.pop(0), free.pop()
                own = replace(context, client=number, stage=stages[number])
                message, state = stored[id(blobs[number])], self.pool.get(number)
                busy[worker.play.remote(own, message, state, number in scored)] = number, worker
            awaited = [*busy, *self._returning]
            ended = ray.wait(awaited, timeout=None if busy else _PATIENCE)[0] if awaited else []
            if not ended:
                outcome.failures.update(dict.fromkeys(waiting, "no worker is left to play it"))
                break
            (done,) = ended
            if done in self._returning:
                free += self._take_back(done)
                continue
            number, worker = busy.pop(done)
            try:
                played, changed = ray.get(done)
                free.append(worker)
            except ray.exceptions.RayTaskError as error:
                raise error.cause from None  # a mistake in code, where clients that fail are not skipped
            except ray.exceptions.RayError as error:
                played, changed = Outcome({}, {number: f"its worker ended ({first_line(error)})"}), None
                self._returning[worker.ready.options(max_task_retries=-1).remote()] = worker
            if changed is not None:
                self.pool.hold(number, changed)
            outcome.values.update(played.values)
            outcome.failures.update(played.failures)
            self.progress.step()
        return self._gathered(outcome)

    def _take_back(self, ready: Any) -> list[Any]:
        """Takes a worker in again that was started again; one that could not be, is none any more."""
        import ray

        worker = self._returning.pop(ready)
        try:
            ray.get(ready)
        except ray.exceptions.RayError:
            self._workers.remove(worker)
            return []
        return [worker]

    def _start(self) -> list[Any]:
        """Starts the workers, and Ray where it does not run yet.

        Raises:
            UserError: If Ray cannot be started or reached.
        """
        import ray

        given = self.simulation
        if given.address:  # else Ray looks for a cluster that is not there for a quarter of an hour
            os.environ.setdefault("RAY_gcs_server_port_wait_time_s", "1")
        try:
            if not ray.is_initialized():
                ray.init(
                    address=given.address,
                    num_cpus=None if given.address else max(1, round(given.workers * given.cpus)),
                    include_dashboard=False,
                    log_to_driver=False,
                    logging_level="error",
                )
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise UserError(f"simulation.address={given.address}: {first_line(error)}") from error
        # No client is played twice: what is lost with its worker is the client's failure.
        options = {"num_cpus": given.cpus, "num_gpus": given.gpus, "max_restarts": -1, "max_task_retries": 0}
        remote = ray.remote(**options)(Worker)
        threads = torch.get_num_threads()
        # By value: Ray warns, on the console, that a worker cannot be started again by what lies in its object store.
        return [remote.remote(self.config, self.build, threads) for _ in range(given.workers)]


class Worker:
    """A process that plays any client, one at a time.

    Args:
        threads: Threads of torch, as in the process that asks: sums round alike.
    """

    def __init__(self, config: Config, build: Builder, threads: int) -> None:
        torch.set_num_threads(threads)
        self.folder = tempfile.TemporaryDirectory(prefix="lit_fedad_worker_")
        own = {"out": self.folder.name, "fresh": False}
        config = {**config, "simulation": {"workers": 0}, "callbacks": {}, **own}
        fabric = make_fabric(**{**config["fabric"], "devices": 1, "num_nodes": 1})
        federation = build(fabric, config, Display(quiet=True)).federation
        assert isinstance(federation.transport, LocalTransport)
        self.exchanges, self.transport = federation.exchanges, federation.transport

    def ready(self) -> None:
        """Answers, once the worker is there."""

    def play(
        self, context: Context, blob: bytes, state: State, scored: bool
    ) -> tuple[Outcome[ClientResult], State | None]:
        """Plays an exchange with one client; returns what came of it, and the client's state where that is new."""
        assert context.client is not None
        number = context.client
        self.transport.pool = ClientPool(state, Path(self.folder.name))
        sent = Sent(self.exchanges.at(context), context, {number: blob})
        outcome = self.transport.play(sent, {number} if scored else ())
        self.transport.settle({number})  # this worker's pool alone
        changed = self.transport.pool.get(number) if number in self.transport.pool else None
        return outcome, changed
