"""The transport of a federation, which carries messages to clients and their answers back, wherever clients are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, Literal, NamedTuple, Protocol, TypeVar

from lightning.fabric import Fabric

from lit_fedad.contracts import Context, Exchange, Message
from lit_fedad.federation.client_runner import ClientResult
from lit_fedad.federation.evaluator import ClientQuery

T = TypeVar("T")

SumStep = Literal["offer", "reveal"]
"""The step of a secure sum: clients answer an invitation with an offer, and a list of survivors with shares."""


@dataclass(frozen=True)
class Outcome(Generic[T]):
    """The outcome of an exchange, or of a query, with some clients.

    Attributes:
        values: Results by client, without clients that failed.
        failures: Causes by client, one line each.
    """

    values: dict[int, T]
    failures: dict[int, str]


class Sent(NamedTuple):
    """The messages that the server sends in an exchange.

    Attributes:
        exchange: The exchange.
        context: Round and index of the exchange.
        blobs: Serialised messages by client.
    """

    exchange: Exchange
    context: Context
    blobs: Mapping[int, bytes]


@dataclass(frozen=True)
class Pose:
    """How clients are prepared for a query, after they have received the server's message.

    Attributes:
        round: The last finished round; clients have the images of this round.
        which: Whether clients predict with their own model or with the server's.
        lent: Entries that replace those of the client in the task's state.
        keep: Whether the state of the prepared client, which predicts, becomes its personal state.
        sums: Whether clients have received the message of `Exchanges.leave_out` instead of that of the next round.
    """

    round: int
    which: Literal["own", "server"] = "own"
    lent: Message = field(default_factory=dict)
    keep: bool = False
    sums: bool = False


class Progress:
    """A count of finished visits to clients, reported to callbacks (`FederationCallback.on_client_end`)."""

    def __init__(self, fabric: Fabric, mine: Collection[int]) -> None:
        self.fabric, self.mine = fabric, mine
        self.total = self.done = 0

    def begin(self, clients: Iterable[int]) -> None:
        """Starts the count again.

        Args:
            clients: Clients that will be visited, each as often as it will be.
        """
        self.total, self.done = self._count(clients), 0

    def extend(self, clients: Iterable[int]) -> None:
        """Raises the total if the next visits exceed it."""
        self.total = max(self.total, self.done + self._count(clients))

    def step(self) -> None:
        """Counts one visit."""
        self.done += 1
        self.fabric.call("on_client_end", self.done, max(self.total, self.done))

    def _count(self, clients: Iterable[int]) -> int:
        return sum(number for client, number in Counter(clients).items() if client in self.mine)


class Transport(Protocol):
    """The connection to clients: in the processes of one Fabric (`LocalTransport`), or on other machines.

    Every method is called in every process. A client's failure is returned, never raised.

    Attributes:
        progress: Count of finished visits to clients.
    """

    progress: Progress

    def play(
        self, sent: Sent, scored: Collection[int], envelopes: Mapping[int, bytes] | None = None
    ) -> Outcome[ClientResult]:
        """Plays an exchange with every client to which a message is addressed; `settle` must follow.

        Args:
            sent: The server's messages of the current exchange.
            scored: Clients that are scored directly after training, with the weights that they have trained.
            envelopes: For secure sums, the bytes from which each client derives the mask of its upload; else None.

        Returns:
            Serialised uploads and scalars; empty on all processes but the first. Uploads are not trusted.
        """

    def settle(self, counted: Collection[int]) -> None:
        """Ends an exchange: a client keeps its new state only if the server used its message.

        Args:
            counted: Clients that continue from their new state; the others continue from their previous state.
        """

    def confer(self, step: SumStep, blobs: Mapping[int, bytes]) -> Outcome[bytes]:
        """Carries messages of a secure sum to clients, and their answers back.

        Args:
            step: The step of the protocol, which determines how clients answer.
            blobs: The server's messages by client.

        Returns:
            Answers by client; empty on all processes but the first. They are not trusted.
        """

    def ask(self, query: ClientQuery[T], sent: Sent, pose: Pose) -> Outcome[T]:
        """Asks every client to which a message is addressed, prepared to predict.

        Args:
            query: The query.
            sent: The messages that clients receive first.
            pose: How clients are prepared.

        Returns:
            Answers by client; empty on all processes but the first.
        """

    def save(self, folder: Path, previous: Path | None) -> None:
        """Adds the clients' states, on which their next exchanges depend, to a checkpoint, in files of this process.

        Args:
            folder: Folder of the new checkpoint.
            previous: Folder of the previous checkpoint; None if there is none.
        """

    def restore(self, folder: Path) -> None:
        """Restores the states that `save` wrote to a complete checkpoint.

        Raises:
            UserError: If one of its files is missing or was changed.
        """
