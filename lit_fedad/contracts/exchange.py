"""The exchanges of a method, each of one message down and one up.

Server and clients use the same exchange object. They do not share a process where clients are other machines, so each
method below is called on one side only, and declared forms follow from the configuration, never from a message that
they check.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, Literal, TypeVar, cast

from lightning.fabric import Fabric
from torch import Tensor
from torch.utils.data import DataLoader

from lit_fedad.contracts.client import Client
from lit_fedad.contracts.disclosure import DisclosedBy, Discloses, Disclosures, Kind
from lit_fedad.contracts.evidence import Evidence
from lit_fedad.contracts.message import Message, MessageSpec, Update
from lit_fedad.contracts.randomness import Context
from lit_fedad.contracts.server import Server
from lit_fedad.contracts.sums import ImageSums, Sums
from lit_fedad.core.errors import UserError, not_there

C = TypeVar("C", contravariant=True)  # the method's client
S = TypeVar("S", contravariant=True)  # its server


class Exchange(Discloses, Generic[C, S]):
    """One message to each client, the client's computation, its answer, and the merging of the answers.

    By default all of it is what client and server of the method do: `Server.broadcast`, `Client.receive`,
    `Client.send`, `Server.validate`, `Server.aggregate`. An exchange of other messages overrides these.

    Attributes:
        name: Name in reports and errors.
        trains: Whether clients refresh (`Client.refresh`) and train between `receive` and `send`.
        down: Whether the server sends its message.
        up: Whether clients answer with theirs.
        sums: How messages add up, where their sum is all that `aggregate` needs; None where it needs each. Where it is
            given, `aggregate` may receive one update that stands for all clients (`SUM`).
        discloses: What the client's message tells of its images; None for what `Client.send` does. A class that
            overrides `send` says it anew.
        joining: What a client that joins in a later round, or comes back, does of this exchange before round 1: it does
            without (``"skip"``), or receives its message then (``"play"``). With None it cannot join.
        first_stage: Whether what it makes of images before round 1 stays as it is where later stages bring others.
        noised: Whether merging draws noise: then a merge of some messages alone tells more, which no epsilon counts.
    """

    name: str = "answer"
    trains: bool = False
    down: bool = True
    up: bool = True
    sums: Sums | None = None
    discloses: Disclosures | DisclosedBy | None = None
    joining: Literal["skip", "play"] | None = None
    first_stage: bool = False
    noised: bool = False

    def broadcast(self, server: S, client_id: int) -> Message:
        """Returns the message to a client. Runs on the server."""
        return cast("Server", server).broadcast(client_id) if self.down else {}

    def broadcast_spec(self, client: C) -> MessageSpec:
        """Declares the form of `broadcast`, from sizes that are the same for every client of the method."""
        return cast("Client", client).broadcast_spec() if self.down else {}

    def receive(self, client: C, message: Message) -> None:
        """Loads the server's message. Runs on the client."""
        if self.down:
            cast("Client", client).receive(message)

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
        return cast("Client", client).send(loader) if self.up else {}

    def upload_spec(self, client: C) -> MessageSpec:
        """Declares the form of `send`, from sizes that are the same for every client of the method."""
        return cast("Client", client).upload_spec() if self.up else {}

    def validate(self, server: S, client_id: int, update: Update) -> None:
        """Checks what the declared form of a client's message cannot say. Runs on the server.

        Args:
            server: The server.
            client_id: The client that sent it.
            update: Its message, of the declared form.

        Raises:
            UserError: If the message cannot be that of a client with so many images.
        """
        if self.up:
            cast("Server", server).validate(client_id, update)

    def aggregate(self, server: S, updates: Mapping[int, Update]) -> None:
        """Merges the clients' messages. Runs on the server.

        Args:
            server: The server.
            updates: By client, in client order; never empty.
        """
        if self.up:
            cast("Server", server).aggregate(updates)


def merges_sums(exchange: Exchange, server: Server) -> bool:
    """Returns whether an exchange's server comes to the same from the sum of messages as from each."""
    forwards = type(exchange).aggregate is Exchange.aggregate
    return exchange.sums is not None and (server.merges_sums if forwards else True)


def image_sums_of(exchange: Exchange, client: Client) -> ImageSums | None:
    """Returns the sums over images of an exchange, if each image's part of them can be bounded; else None."""
    return exchange.sums.by_image(client) if exchange.sums and exchange.sums.by_image else None


def disclosed_by(exchange: Exchange, client: Client) -> Disclosures:
    """Returns what a client's message tells of its images; nothing where it sends none.

    Raises:
        UserError: If neither the exchange nor the client says it.
    """
    if not exchange.upload_spec(client):
        return ()
    declared = client.discloses if exchange.discloses is None else exchange.discloses
    if isinstance(declared, DisclosedBy):
        declared = declared.of(client)
    if not declared:
        raise UserError(
            f"exchange '{exchange.name}' of {type(client).__name__} does not declare what it discloses: say discloses ="
            " (...) in its class"
        )
    return tuple(
        replace(part, images=client.task.images_behind)
        if part.kind is Kind.WEIGHTS and part.images is None
        else part
        for part in declared
    )


class Idle(Exchange[Any, Any]):
    """An exchange without messages: the round of a method that does all before round 1."""

    name = "nothing"
    down = up = False


class LeaveOut(Exchange[C, S]):
    """An exchange whose message lets clients take images of their own out of the model again."""

    up = False

    def holds(self, client: C, stage: int) -> bool | None:
        """Tells whether the model holds the images of a client's stage; None where it does in part.

        Of a stage in which the client was not sampled, or failed, it holds none.
        """
        return True

    def leave_out(self, client: C, loader: DataLoader) -> None:
        """Takes images out of the model in the task's buffers, as if nobody had seen them. Runs on the client.

        Args:
            client: The live client, which has received the message.
            loader: Some of its images.

        Raises:
            UserError: If no model remains without them.
        """
        raise not_there(self, "leave_out")

    def scores(
        self, client: C, loaders: Sequence[DataLoader], score: Callable[[C, DataLoader], Tensor]
    ) -> Iterator[Tensor | None]:
        """Computes scores as if nobody had seen the images that are scored; the model stays what it was.

        Args:
            client: See `leave_out`.
            loaders: Some of its images each, which are left out together.
            score: Computes scores by the model in the task's buffers.

        Yields:
            The scores [n] of a loader's images; None where no model remains without them.
        """
        task = cast("Client", client).task
        whole = {name: getattr(task, name) for name in task.local_buffers}
        for loader in loaders:
            scores = None
            try:
                self.leave_out(client, loader)
                scores = score(client, loader)
            except UserError:
                pass
            finally:
                for name, buffer in whole.items():
                    setattr(task, name, buffer)
            yield scores


@dataclass(frozen=True)
class Exchanges:
    """The exchanges of a method.

    Attributes:
        setup: Exchanges before round 1, each run once with every client; the last is round 0, the one before it -1.
        rounds: Exchanges of every round from 1, in order.
        leave_out: The exchange by which clients take images of their own out of the model again; only its message down
            is sent, after rounds. None where that takes new training.
        noised: The exchanges under differential privacy, each of which is noised; None where they are the same.
        evidence: What messages show of single images; audits refuse a method that does not say so.
    """

    setup: tuple[Exchange, ...] = ()
    rounds: tuple[Exchange, ...] = (Idle(),)
    leave_out: LeaveOut | None = None
    noised: Exchanges | None = None
    evidence: Evidence | None = None

    def __post_init__(self) -> None:
        """Refuses what is no tuple of exchanges.

        Raises:
            TypeError: If one is forgotten, or a class in the place of its object.
        """
        for name, listed in (("setup", self.setup), ("rounds", self.rounds)):
            if not isinstance(listed, tuple) or any(isinstance(one, type) for one in listed):
                raise TypeError(
                    f"Exchanges: {name}={listed!r} must be a tuple of exchanges, such as (Train(),)"
                )

    @property
    def under_noise(self) -> Exchanges:
        """The exchanges of a run with differential privacy, before noise is put around them."""
        return self.noised or self

    @property
    def joinable(self) -> bool:
        """Whether a client can join after round 0."""
        return all(exchange.joining for exchange in self.setup)

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


@dataclass(frozen=True)
class Method:
    """A method: what its clients do, what its server does, and the messages between them.

    Attributes:
        client: The client side; one live object for all clients of a process.
        server: The server side.
        exchanges: Before round 1 and in every round.
    """

    client: Client
    server: Server
    exchanges: Exchanges

    @property
    def joinable(self) -> bool:
        """Whether clients can take part that were not there before round 1."""
        return self.server.admits and self.exchanges.joinable
