"""The transport to clients in the processes of one Fabric, which plays them in turn and returns their failures."""

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
from lit_fedad.core.errors import UserError, first_line, is_out_of_memory
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
    be interrupted: its process is ended, and with it the run, which continues from its last checkpoint when it is
    started again.

    Args:
        seconds: Time limit in seconds; None for no limit.
        who: Name of the client, for the last message of a process that is ended.

    Raises:
        UserError: In the block, at the deadline; or at once, where the process has no alarms (outside the main thread,
            on Windows).
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
    """Reports that a client hangs, and ends the process at once."""
    cause = f"{who} hangs beyond federation.sampler.deadline={seconds:g} seconds"
    sys.stderr.write(f"error: {cause} and cannot be interrupted: its process ends\n")
    sys.stderr.flush()
    os._exit(2)


T = TypeVar("T")
EXPECTED = (UserError, RuntimeError, ValueError, OSError, ArithmeticError)
"""Errors that are caused by data and machines, rather than by mistakes in code."""

_log = logging.getLogger(__name__)


class Parties(Protocol):
    """The side of this process's clients in the protocol of secure sums."""

    def confer(self, step: SumStep, client: int, blob: bytes) -> bytes:
        """Computes a client's answer to a message of the server; see `Transport.confer`."""

    def mask(self, client: int, envelopes: bytes) -> Mask:
        """Returns the mask that hides a client's message."""


@dataclass(eq=False)
class LocalTransport:
    """The transport to clients that one live client plays in turn; their states are kept in a pool.

    Attributes:
        runner: Plays the live client.
        data: The clients' training data.
        pool: The clients' personal states.
        mine: Clients of this process.
        evaluator: Scores clients directly after training.
        sampler: The policy for failures and the deadline. Where it does not skip failing clients, mistakes in code are
            raised.
        parties: The clients' side in secure sums; None without secure sums.
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
        """Plays an exchange with every addressed client of this process; see `Transport.play`."""
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
        """Lets this process's clients keep their new or their previous states; see `Transport.settle`."""
        self.pool.settle(counted)

    def confer(self, step: SumStep, blobs: Mapping[int, bytes]) -> Outcome[bytes]:
        """Returns the answers of this process's clients to messages of a secure sum; see `Transport.confer`."""
        assert self.parties is not None
        outcome: Outcome[bytes] = Outcome({}, {})
        for number in sorted(self.mine.intersection(blobs)):
            try:
                outcome.values[number] = self.parties.confer(step, number, blobs[number])
            except UserError as error:
                outcome.failures[number] = str(error)
        return self._gathered(outcome)

    def ask(self, query: ClientQuery[T], sent: Sent, pose: Pose) -> Outcome[T]:
        """Asks every addressed client of this process, prepared to predict; see `Transport.ask`."""
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
        """Calls `act` with the live client in the place of each addressed client, after it has received the message.

        An error in it, or a missed deadline, is returned as the failure of that client.
        """
        outcome: Outcome[T] = Outcome({}, {})
        for number in sorted(self.mine.intersection(sent.blobs)):
            context = replace(sent.context, client=number, stage=data.stages[number])
            try:
                with deadline(self.sampler.deadline, f"client {number}"):
                    self.runner.activate(sent.exchange, context, self.pool.get(number), sent.blobs[number])
                    outcome.values[number] = act(self.runner.client, number)
            except Exception as error:
                if not self.sampler.skips and not isinstance(error, EXPECTED):
                    raise
                outcome.failures[number] = cause_of(error)
            self.progress.step()
        return self._gathered(outcome)

    def _gathered(self, outcome: Outcome[T]) -> Outcome[T]:
        """Gathers values and causes of failures from all processes on the first, in the order of clients."""
        fabric = self.runner.fabric
        return Outcome(gather(fabric, outcome.values), gather(fabric, outcome.failures))


def cause_of(error: Exception) -> str:
    """Returns the cause of a client's failure, in one line."""
    _log.debug("a client failed", exc_info=error)
    if isinstance(error, UserError):
        return str(error)
    # Torch names its own source file where memory is missing, which tells a user nothing.
    text = "out of memory" if is_out_of_memory(error) else first_line(error)
    return f"{type(error).__name__}: {text}"
