"""What a method is made of: exchanges of one message down and one up.

Every exchange is one object that both sides know. The server's side and the client's side never share a process where
clients are other machines, so that each method below is called on one side alone, and declared forms follow from the
configuration, never from a message that they are to check.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from lightning.fabric import Fabric
from torch.utils.data import DataLoader

from lit_fedad.contracts.context import Context
from lit_fedad.contracts.message import Message, MessageSpec, Update

C = TypeVar("C", contravariant=True)  # the method's client
S = TypeVar("S", contravariant=True)  # its server


class Exchange(Generic[C, S]):
    """One message to each client, what the client does with it, its answer, and how answers are merged.

    The default sends nothing either way.

    Attributes:
        name: Named in reports and errors.
        trains: Whether clients refresh (`Client.refresh`) and train between `receive` and `send`.
    """

    name: str = "nothing"
    trains: bool = False

    def broadcast(self, server: S, client_id: int) -> Message:
        """Returns what a client is sent. Runs on the server."""
        return {}

    def broadcast_spec(self, client: C) -> MessageSpec:
        """Declares the form of `broadcast`, from sizes that any client of the method knows."""
        return {}

    def receive(self, client: C, message: Message) -> None:
        """Takes the server's message over. Runs on the client."""

    def train(self, client: C, loader: DataLoader, fabric: Fabric) -> dict[str, float]:
        """Trains the client, where the exchange does. Runs on the client.

        Args:
            client: The live client.
            loader: Its training batches, in random order.
            fabric: Device and precision.

        Returns:
            Means of the scalars to track.
        """
        return {}

    def send(self, client: C, loader: DataLoader) -> Message:
        """Returns what goes up. Runs on the client.

        Args:
            client: The live client.
            loader: Its training batches in a fixed order.
        """
        return {}

    def upload_spec(self, client: C) -> MessageSpec:
        """Declares the form of `send`, from sizes that any client of the method knows."""
        return {}

    def aggregate(self, server: S, updates: Mapping[int, Update]) -> None:
        """Merges what clients sent. Runs on the server.

        Args:
            server: The server.
            updates: By client, in client order; never empty.
        """


@dataclass(frozen=True)
class Exchanges:
    """The exchanges of a method.

    Attributes:
        setup: Those before round 1, each once and with every client; the last one is round 0, the one before -1.
        rounds: Those that every round from 1 is made of, in order.
    """

    setup: tuple[Exchange, ...] = ()
    rounds: tuple[Exchange, ...] = (Exchange(),)

    @property
    def first_round(self) -> int:
        """Number of the first exchange: at most 1, lower by one for every set-up exchange."""
        return 1 - len(self.setup)

    def of_round(self, round: int) -> tuple[Exchange, ...]:
        """Lists the exchanges of a round: one of the set-up up to round 0, all of `rounds` from 1."""
        return self.rounds if round > 0 else (self.setup[round - 1],)

    def at(self, context: Context) -> Exchange:
        """Returns the exchange that a context says is running."""
        return self.of_round(context.round)[context.exchange]
