"""The transport to clients that Ray workers play, on this machine or on a cluster."""

from __future__ import annotations

import math
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
    """Settings of the Ray workers that play the clients.

    Attributes:
        workers: Number of worker processes, above 0; each plays one client at a time.
        address: Address of a Ray cluster, such as ``auto``; None for workers on this machine only.
        cpus: CPU cores of each worker, by which Ray places workers on machines.
        gpus: GPUs of each worker; with a fraction, several workers share one.

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

_WORKER_WAIT_S = 300
"""Seconds to wait for a worker to return when none is left."""


class RayTransport(LocalTransport):
    """The transport to clients that Ray workers play; queries to clients are answered in this process.

    A worker builds the run's data and live client once. It receives the server's bytes and the client's personal state,
    and returns the client's bytes and its new state. In the worker a `LocalTransport` plays the exchange, so results
    equal those of a single process with as many threads, to the last digit. If a worker dies, alone or with its
    machine, the client that it played has failed. Ray starts the worker again where there is room, and it plays clients
    again once it is ready.
    """

    def __init__(self, config: Config, simulation: Simulation, build: Builder, here: LocalTransport) -> None:
        super().__init__(here.runner, here.data, here.pool, here.mine, here.evaluator, here.sampler)
        self.config, self.simulation, self.build = config, simulation, build
        self._workers: list[Any] = []
        self._returning: dict[Any, Any] = {}  # workers that Ray restarts, by their call of `Worker.ready`

    def play(
        self, sent: Sent, scored: Collection[int], envelopes: Mapping[int, bytes] | None = None
    ) -> Outcome[ClientResult]:
        """Plays an exchange with every client to which a message is addressed; see `Transport.play`."""
        import ray

        _, context, blobs = sent
        self._workers = self._workers or self._start()
        free = [worker for worker in self._workers if worker not in self._returning.values()]
        busy, waiting = dict[Any, tuple[int, Any]](), sorted(blobs)
        # A blob that several clients receive is put into Ray's object store once.
        stored = {id(blob): ray.put(blob) for blob in {id(blob): blob for blob in blobs.values()}.values()}
        outcome: Outcome[ClientResult] = Outcome({}, {})
        stages = self.data.at(context.round).stages
        while waiting or busy:
            while waiting and free:
                number, worker = waiting.pop(0), free.pop()
                own_context = replace(context, client=number, stage=stages[number])
                message, state = stored[id(blobs[number])], self.pool.get(number)
                busy[worker.play.remote(own_context, message, state, number in scored)] = number, worker
            awaited = [*busy, *self._returning]
            ended = ray.wait(awaited, timeout=None if busy else _WORKER_WAIT_S)[0] if awaited else []
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
                raise error.cause from None  # a mistake in code; workers raise it if failing clients are not skipped
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
        """Returns a worker that Ray has restarted, or nothing if that failed; then the worker is given up.

        Args:
            ready: The finished call of `Worker.ready`.
        """
        import ray

        worker = self._returning.pop(ready)
        try:
            ray.get(ready)
        except ray.exceptions.RayError:
            self._workers.remove(worker)
            return []
        return [worker]

    def _start(self) -> list[Any]:
        """Starts the workers, and Ray if it is not running yet.

        Raises:
            UserError: If Ray cannot be started or reached, or this machine has no room for the workers.
        """
        import ray

        chosen = self.simulation
        if chosen.address:  # otherwise Ray would search 15 minutes for a cluster that does not exist
            os.environ.setdefault("RAY_gcs_server_port_wait_time_s", "1")
        try:
            if not ray.is_initialized():
                ray.init(
                    address=chosen.address,
                    num_cpus=None if chosen.address else max(1, math.ceil(chosen.workers * chosen.cpus)),
                    include_dashboard=False,
                    log_to_driver=False,
                    logging_level="error",
                )
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise UserError(f"simulation.address={chosen.address}: {first_line(error)}") from error
        if not chosen.address:  # a cluster may grow
            _refuse_too_many(chosen, ray.cluster_resources())
        # Ray must not repeat a call of `Worker.play`: if a worker dies, its client has failed in this exchange.
        options = {
            "num_cpus": chosen.cpus,
            "num_gpus": chosen.gpus,
            "max_restarts": -1,
            "max_task_retries": 0,
        }
        remote = ray.remote(**options)(Worker)
        threads = torch.get_num_threads()
        # Arguments are passed by value: with references into its object store, Ray would warn on the console that it
        # cannot restart a worker.
        return [remote.remote(self.config, self.build, threads) for _ in range(chosen.workers)]


def _refuse_too_many(chosen: Simulation, room: Mapping[str, float]) -> None:
    """Refuses workers for which Ray would wait without end, since it has too few cores or GPUs."""
    for key, each, kind in (("cpus", chosen.cpus, "CPU"), ("gpus", chosen.gpus, "GPU")):
        needed, there = round(chosen.workers * each, 4), room.get(kind, 0)
        if needed > there:
            raise UserError(
                f"simulation.workers={chosen.workers} simulation.{key}={each:g} need {needed:g} {kind}s, and Ray has"
                f" {there:g}; lower one of them"
            )


class Worker:
    """A Ray process that plays any client, one at a time.

    Args:
        config: The run's configuration.
        build: Builds all parts of the run.
        threads: Number of torch's threads: the same as in the calling process, so that sums are rounded equally.
    """

    def __init__(self, config: Config, build: Builder, threads: int) -> None:
        torch.set_num_threads(threads)
        self.folder = tempfile.TemporaryDirectory(prefix="lit_fedad_worker_")
        private = {"out": self.folder.name, "fresh": False}
        config = {**config, "simulation": {"workers": 0}, "callbacks": {}, **private}
        fabric = make_fabric(**{**config["fabric"], "devices": 1, "num_nodes": 1})
        federation = build(fabric, config, Display(quiet=True)).federation
        assert isinstance(federation.transport, LocalTransport)
        self.exchanges, self.transport = federation.exchanges, federation.transport

    def ready(self) -> None:
        """Returns nothing; the call ends as soon as the worker runs."""

    def play(
        self, context: Context, blob: bytes, state: State, scored: bool
    ) -> tuple[Outcome[ClientResult], State | None]:
        """Plays an exchange with one client; returns the outcome, and the client's new state if it has one."""
        assert context.client is not None
        number = context.client
        self.transport.pool = ClientPool(state, Path(self.folder.name))
        sent = Sent(self.exchanges.at(context), context, {number: blob})
        outcome = self.transport.play(sent, {number} if scored else ())
        self.transport.settle({number})  # only in this worker's pool; the server may still decide otherwise
        changed = self.transport.pool.get(number) if number in self.transport.pool else None
        return outcome, changed
