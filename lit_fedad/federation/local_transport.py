"""The transport to clients in the processes of one Fabric, one after the other; a failure is the client's own."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Protocol, TypeVar

from lit_fedad.contracts import Client
from lit_fedad.contracts.state import state_of
from lit_fedad.core.errors import UserError, first_line
from lit_fedad.federation.client_pool import ClientPool
from lit_fedad.federation.client_runner import ClientData, ClientResult, ClientRunner, Mask, pose_client
from lit_fedad.federation.evaluator import ClientQuery, Evaluator
from lit_fedad.federation.processes import gather
from lit_fedad.federation.sampling import ClientSampler
from lit_fedad.federation.transport import Outcome, Pose, Progress, Sent, SumStep

GRACE_S = 5.0
"""Seconds that a client has to stop at its deadline before its process is ended."""


@contextmanager
def deadline(seconds: float | None, who: str) -> Iterator[None]:
    """Limits the time of a block.

    A block that runs Python code, sleeps or waits for a file is interrupted. A block that hangs in compiled code cannot
    be: its process is ended, and with it the run, which continues from its last checkpoint when it is started again.

    Raises:
        UserError: In the block, at the deadline; or at once, where there are no alarms (outside the main thread, on
            Windows).
    """
    if seconds is None:
        yield
        return
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        raise UserError(
            "federation.sampler.deadline needs the alarms of a process's main thread; leave it null here"
        )

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise UserError(f"took longer than federation.sampler.deadline={seconds:g} seconds")

    last_resort = threading.Timer(seconds + GRACE_S, _end_process, (who, seconds))
    last_resort.daemon = True
    previous = signal.signal(signal.SIGALRM, interrupt)
    last_resort.start()
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
        last_resort.cancel()


def _end_process(who: str, seconds: float) -> None:
    late = f"{who} hangs beyond federation.sampler.deadline={seconds:g} seconds"
    sys.stderr.write(f"error: {late} and cannot be interrupted: its process ends\n")
    sys.stderr.flush()
    os._exit(2)


T = TypeVar("T")
EXPECTED = (UserError, RuntimeError, ValueError, OSError, ArithmeticError)
"""Errors that data and machines cause, rather than mistakes in code."""

_log = logging.getLogger(__name__)


class Parties(Protocol):
    """The parts of this process's clients in secure sums."""

    def confer(self, step: SumStep, client: int, blob: bytes) -> bytes:
        """Answers a message of the server; see `Transport.confer`."""

    def mask(self, client: int, envelopes: bytes) -> Mask:
        """Returns what a client masks its message with."""


@dataclass(eq=False)
class LocalTransport:
    """The transport to clients that one live object plays, their states in a pool.

    Attributes:
        sampler: Says whether a client that fails is left out, where otherwise mistakes in code are raised, and how much
            time it has.
        parties: The clients' parts in secure sums; None where there are none.
    """

    runner: ClientRunner
    data: ClientData
    pool: ClientPool
    mine: set[int]
    evaluator: Evaluator
    sampler: ClientSampler
    parties: Parties | None = None

    def __post_init__(self) -> None:
        self.progress = Progress(self.runner.fabric, self.mine)

    def play(
        self, sent: Sent, scored: Collection[int], envelopes: Mapping[int, bytes] | None = None
    ) -> Outcome[ClientResult]:
        """Plays an exchange with every client in its place; see `Transport.play`."""
        data = self.data.at(sent.context.round)

        def played(client: Client, number: int) -> ClientResult:
            mask = self.parties.mask(number, envelopes[number]) if self.parties and envelopes else None
            result = self.runner.play(sent.exchange, data, mask)
            self.pool.hold(number, state_of(client))
            if number in scored:
                client.deploy()
                result.trained = self.evaluator.score(client, number)
            return result

        return self._visit(sent, data, played)

    def settle(self, counted: Collection[int]) -> None:
        """Has this process's clients go on from their new states or from those before; see `Transport.settle`."""
        self.pool.settle(counted)

    def confer(self, step: SumStep, blobs: Mapping[int, bytes]) -> Outcome[bytes]:
        """Has every client's part in a secure sum answer; see `Transport.confer`."""
        assert self.parties is not None
        outcome: Outcome[bytes] = Outcome({}, {})
        for number in sorted(self.mine.intersection(blobs)):
            try:
                outcome.values[number] = self.parties.confer(step, number, blobs[number])
            except UserError as error:
                outcome.failures[number] = str(error)
        return self._gathered(outcome)

    def ask(self, query: ClientQuery[T], sent: Sent, pose: Pose) -> Outcome[T]:
        """Asks every client in its place, set up as it predicts; see `Transport.ask`."""
        data = self.data.at(pose.round)

        def answered(client: Client, number: int) -> T:
            pose_client(client, pose.which, pose.lent, data)
            if pose.keep:
                self.pool.put(number, state_of(client))
            return query(client, number)

        return self._visit(sent, data, answered)

    def save(self, folder: Path, previous: Path | None) -> None:
        """Writes the states of this process's clients to a checkpoint."""
        self.pool.save(folder, previous)

    def restore(self, folder: Path) -> None:
        """Reads the states of this process's clients from a checkpoint."""
        self.pool.restore(folder, self.mine)

    def _visit(self, sent: Sent, data: ClientData, act: Callable[[Client, int], T]) -> Outcome[T]:
        """Has the live client act for each client in its place, once it has received the client's message.

        What goes wrong there, or takes too long, is the client's failure, and becomes its answer.
        """
        outcome: Outcome[T] = Outcome({}, {})
        for number in sorted(self.mine.intersection(sent.blobs)):
            own = replace(sent.context, client=number, stage=data.stages[number])
            try:
                with deadline(self.sampler.deadline, f"client {number}"):
                    self.runner.activate(sent.exchange, own, self.pool.get(number), sent.blobs[number])
                    outcome.values[number] = act(self.runner.client, number)
            except Exception as error:
                if not self.sampler.skips and not isinstance(error, EXPECTED):
                    raise
                outcome.failures[number] = cause_of(error)
            self.progress.step()
        return self._gathered(outcome)

    def _gathered(self, outcome: Outcome[T]) -> Outcome[T]:
        """Gathers values and causes of all processes on the first, in the order of clients."""
        fabric = self.runner.fabric
        return Outcome(gather(fabric, outcome.values), gather(fabric, outcome.failures))


def cause_of(error: Exception) -> str:
    """Returns why a client failed, in one line."""
    _log.debug("a client failed", exc_info=error)
    return str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {first_line(error)}"
