"""The transport of a federation: it brings messages to clients, and their answers back, wherever clients are."""

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
"""What a client answers in a secure sum: an invitation with an offer, named survivors with shares."""


@dataclass(frozen=True)
class Outcome(Generic[T]):
    """What came of an exchange with some clients.

    Attributes:
        values: Values by client, without clients that failed.
        failures: Causes by client, one line each.
    """

    values: dict[int, T]
    failures: dict[int, str]


class Sent(NamedTuple):
    """What the server sends in an exchange.

    Attributes:
        context: Round and exchange.
        blobs: Its serialised messages by client.
    """

    exchange: Exchange
    context: Context
    blobs: Mapping[int, bytes]


@dataclass(frozen=True)
class Pose:
    """How clients are set up before they are asked, once they have received the server's message.

    Attributes:
        round: The last finished round, whose images they hold.
        which: Whether they predict with their own model or with the server's.
        lent: Entries of the task's state that replace those of the client.
        keep: Whether what predicts becomes the client's personal state.
        sums: Whether they have received the message of `Exchanges.leave_out` instead of that of the next round.
    """

    round: int
    which: Literal["own", "server"] = "own"
    lent: Message = field(default_factory=dict)
    keep: bool = False
    sums: bool = False


class Progress:
    """The number of visits to clients that are done, told to callbacks (`FederationCallback.on_client_end`)."""

    def __init__(self, fabric: Fabric, mine: Collection[int]) -> None:
        self.fabric, self.mine = fabric, mine
        self.total = self.done = 0

    def begin(self, clients: Iterable[int]) -> None:
        """Begins anew: each client is named once for each visit to come."""
        self.total, self.done = self._count(clients), 0

    def extend(self, clients: Iterable[int]) -> None:
        """Makes room for the next visits, where more come than were named."""
        self.total = max(self.total, self.done + self._count(clients))

    def step(self) -> None:
        """Counts one visit."""
        self.done += 1
        self.fabric.call("on_client_end", self.done, max(self.total, self.done))

    def _count(self, clients: Iterable[int]) -> int:
        return sum(number for client, number in Counter(clients).items() if client in self.mine)


class Transport(Protocol):
    """The way to clients: in the processes of one Fabric (`LocalTransport`), or on other machines.

    Every method is called in every process. A client's failure is returned, never raised.

    Attributes:
        progress: Visits to clients that are done.
    """

    progress: Progress

    def play(
        self, sent: Sent, scored: Collection[int], envelopes: Mapping[int, bytes] | None = None
    ) -> Outcome[ClientResult]:
        """Plays an exchange with every client that a message is for; `settle` must follow.

        Args:
            sent: The server's messages of the current exchange.
            scored: Clients that are scored directly after training, with the weights that they have trained.
            envelopes: Where uploads are summed securely, what each client masks its own with.

        Returns:
            Serialised uploads and scalars; empty on all processes but the first. Uploads are not trusted.
        """

    def settle(self, counted: Collection[int]) -> None:
        """Ends an exchange: a client keeps its new state only if the server used its message.

        Args:
            counted: Clients that go on from their new state; the others go on from that before it.
        """

    def confer(self, step: SumStep, blobs: Mapping[int, bytes]) -> Outcome[bytes]:
        """Brings clients messages of a secure sum, and their answers back.

        Args:
            step: What they answer.
            blobs: The server's messages by client.

        Returns:
            Answers by client; empty on all processes but the first. They are not trusted.
        """

    def ask(self, query: ClientQuery[T], sent: Sent, pose: Pose) -> Outcome[T]:
        """Asks every client that a message is for, set up as it predicts.

        Args:
            query: The query.
            sent: The messages that they receive.
            pose: How clients are set up.

        Returns:
            Values by client; empty on all processes but the first.
        """

    def save(self, folder: Path, previous: Path | None) -> None:
        """Adds to a checkpoint what the clients' next exchanges depend on, in files of this process."""

    def restore(self, folder: Path) -> None:
        """Goes back to what `save` wrote to a complete checkpoint.

        Raises:
            UserError: If a file of it is missing or was changed.
        """
