"""The exchanges of a method, each of one message down and one up.

Server and clients use the same exchange object. They do not share a process where clients are other machines, so each
method below is called on one side only, and declared forms follow from the configuration, never from a message that
they check.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from lightning.fabric import Fabric
from torch.utils.data import DataLoader

from lit_fedad.contracts.additive import Additive
from lit_fedad.contracts.context import Context
from lit_fedad.contracts.image_sums import ImageSums
from lit_fedad.contracts.message import Message, MessageSpec, Update

C = TypeVar("C", contravariant=True)  # the method's client
S = TypeVar("S", contravariant=True)  # its server


class Exchange(Generic[C, S]):
    """One message to each client, the client's computation, its answer, and the merging of the answers.

    The default sends nothing in either direction.

    Attributes:
        name: Name in reports and errors.
        trains: Whether clients refresh (`Client.refresh`) and train between `receive` and `send`.
    """

    name: str = "nothing"
    trains: bool = False

    def broadcast(self, server: S, client_id: int) -> Message:
        """Returns the message to a client. Runs on the server."""
        return {}

    def broadcast_spec(self, client: C) -> MessageSpec:
        """Declares the form of `broadcast`, from sizes that are the same for every client of the method."""
        return {}

    def receive(self, client: C, message: Message) -> None:
        """Loads the server's message. Runs on the client."""

    def train(self, client: C, loader: DataLoader, fabric: Fabric) -> dict[str, float]:
        """Trains the client, where the exchange includes training. Runs on the client.

        Args:
            client: The live client.
            loader: Its training batches, in random order.
            fabric: Device and precision.

        Returns:
            Means of the scalars to track.
        """
        return {}

    def send(self, client: C, loader: DataLoader) -> Message:
        """Returns the message to the server. Runs on the client.

        Args:
            client: The live client.
            loader: Its training batches in a fixed order.
        """
        return {}

    def upload_spec(self, client: C) -> MessageSpec:
        """Declares the form of `send`, from sizes that are the same for every client of the method."""
        return {}

    def additive(self, client: C) -> Additive | None:
        """Declares how messages add up, if their sum is all that `aggregate` needs; None if it needs each.

        Where it is declared, `aggregate` may receive one update that stands for all clients (`SUM`).
        """
        return None

    def image_sums(self, client: C) -> ImageSums | None:
        """Declares the sums over images that `aggregate` needs, if each image's part can be bounded; else None."""
        return None

    def takes_sums(self, server: S) -> bool:
        """Returns whether this server merges a sum to the same as the single messages. Runs on the server."""
        return True

    def validate(self, server: S, client_id: int, update: Update) -> None:
        """Checks what the declared form of a client's message cannot say. Runs on the server.

        Args:
            server: The server.
            client_id: The client that sent it.
            update: Its message, of the declared form.

        Raises:
            UserError: If the message cannot be that of a client with so many images.
        """

    def aggregate(self, server: S, updates: Mapping[int, Update]) -> None:
        """Merges the clients' messages. Runs on the server.

        Args:
            server: The server.
            updates: By client, in client order; never empty.
        """


class SumsExchange(Exchange[C, S]):
    """An exchange whose message lets clients take images of their own out of the model again."""

    def leave_out(self, client: C, loader: DataLoader) -> None:
        """Takes images out of the model in the task's buffers, as if nobody had seen them. Runs on the client.

        Args:
            client: The live client, which has received the message.
            loader: Some of its images.

        Raises:
            UserError: If no model remains without them.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class Exchanges:
    """The exchanges of a method.

    Attributes:
        setup: Exchanges before round 1, each run once with every client; the last is round 0, the one before it -1.
        rounds: Exchanges of every round from 1, in order.
        sums: The exchange by which clients take images of their own out of the model again; only its message down is
            sent, after rounds. None where that takes new training.
        noised: The exchanges under differential privacy, each of which is noised; None where they are the same.
    """

    setup: tuple[Exchange, ...] = ()
    rounds: tuple[Exchange, ...] = (Exchange(),)
    sums: SumsExchange | None = None
    noised: Exchanges | None = None

    @property
    def under_noise(self) -> Exchanges:
        """The exchanges of a run with differential privacy, before noise is put around them."""
        return self.noised or self

    @property
    def first_round(self) -> int:
        """Round number of the first exchange: 1 minus the number of set-up exchanges."""
        return 1 - len(self.setup)

    def of_round(self, round: int) -> tuple[Exchange, ...]:
        """Lists the exchanges of a round: one set-up exchange up to round 0, all of `rounds` from 1."""
        return self.rounds if round > 0 else (self.setup[round - 1],)

    def after(self, context: Context) -> Context:
        """Returns the context of the exchange that follows the one of a context."""
        if context.exchange + 1 < len(self.of_round(context.round)):
            return replace(context, exchange=context.exchange + 1)
        return replace(context, round=context.round + 1, exchange=0)

    def at(self, context: Context) -> Exchange:
        """Returns the exchange of a context's round and exchange index."""
        return self.of_round(context.round)[context.exchange]
