"""The turns of clients, one after the other in each process; a client's failure is its own."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from lit_fedad.contracts import Client, Context, Exchange, Server
from lit_fedad.errors import UserError, first_line
from lit_fedad.federation.client_data import ClientData
from lit_fedad.federation.client_pool import ClientPool
from lit_fedad.federation.deadline import deadline
from lit_fedad.federation.processes import gather, on_first
from lit_fedad.federation.turn import Turn

T = TypeVar("T")
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Outcome(Generic[T]):
    """What came of the turns of some clients.

    Attributes:
        values: Values by client, without clients that failed.
        failures: Causes by client, one line each.
    """

    values: dict[int, T]
    failures: dict[int, str]


class Turns:
    """A runner of many clients' turns.

    Args:
        server: The method's server, which sends messages from the first process.
        turn: The turn of the live client.
        pool: States of the clients of this process.
        mine: Clients of this process.
        skips: Whether a client that fails is left out; otherwise mistakes in code are raised.
        limit: Longest turn in seconds; None for no limit.

    Attributes:
        total: Number of turns of this process in the whole run, for the progress.
        done: Number of those finished.
    """

    def __init__(
        self, server: Server, turn: Turn, pool: ClientPool, mine: set[int], skips: bool, limit: float | None
    ) -> None:
        self.server, self.turn, self.pool, self.mine = server, turn, pool, mine
        self.skips, self.limit = skips, limit
        self.total = self.done = 0

    def messages(self, exchange: Exchange, clients: Iterable[int], context: Context) -> dict[int, bytes]:
        """Serialises the server's messages by client on the first process, for every process.

        Raises:
            UserError: On every process, if a message differs from its declared form.
        """
        return on_first(self.turn.fabric, lambda: self.pack(exchange, clients, context))

    def pack(self, exchange: Exchange, clients: Iterable[int], context: Context) -> dict[int, bytes]:
        """Serialises the server's messages by client; equal messages are serialised once."""
        blobs: dict[int, bytes] = {}
        packed: dict[tuple[Any, ...], bytes] = {}
        kept = []  # so that no two tensors have the same id
        spec = exchange.broadcast_spec(self.turn.client)
        for client in clients:
            message = exchange.broadcast(self.server, client)
            kept.append(message)
            key = tuple((name, id(tensor)) for name, tensor in message.items())
            if key not in packed:
                packed[key] = self.turn.channel.down.pack(message, spec, context, "the server")
            blobs[client] = packed[key]
        return blobs

    def play(
        self,
        exchange: Exchange,
        context: Context,
        data: ClientData,
        blobs: Mapping[int, bytes],
        function: Callable[[Client, int], T],
    ) -> Outcome[T]:
        """Calls a function with every client, in its place and with the server's message.

        Args:
            exchange: The current exchange.
            context: Round and exchange.
            data: The round's data.
            blobs: The server's messages, by client.
            function: The function, of the live client and its number.

        Returns:
            The outcome of all processes; empty on all processes but the first.
        """
        answers: dict[int, tuple[T | None, str | None]] = {}
        for number in sorted(self.mine.intersection(blobs)):
            own = replace(context, client=number, stage=data.stages[number])
            try:
                with deadline(self.limit, f"client {number}"):
                    self.turn.activate(exchange, own, self.pool.get(number), blobs[number])
                    answers[number] = function(self.turn.client, number), None
            except Exception as error:
                answers[number] = None, self._cause(error)
            self.done += 1
            self.turn.fabric.call("on_client_end", self.done, max(self.total, self.done))
        outcome: Outcome[Any] = Outcome({}, {})
        for number, (value, cause) in gather(self.turn.fabric, answers).items():
            if cause is None:
                outcome.values[number] = value
            else:
                outcome.failures[number] = cause
        return outcome

    def _cause(self, error: Exception) -> str:
        """Returns a failure in one line; raises it again where it shows a mistake in code and nothing is skipped."""
        expected = isinstance(error, (UserError, RuntimeError, ValueError, OSError, ArithmeticError))
        if not expected and not self.skips:
            raise error
        _log.debug("a client failed", exc_info=error)
        return str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {first_line(error)}"
