"""The exchanges of a method; an exchange is one message to each client (down) and one back to the server (up).

Server and clients use the same exchange object, or equal ones where clients are other machines. The two sides then do
not share a process: each method below is called on one side only, and the declared form of a message follows from the
configuration, never from the message that is checked against it.
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
S = TypeVar("S", contravariant=True)  # the method's server


class Exchange(Discloses, Generic[C, S]):
    """One message to each client, the client's computation, its answer, and the merging of the answers.

    By default an exchange calls the methods of client and server: `Server.broadcast`, `Client.receive`, `Client.send`,
    `Server.validate`, `Server.aggregate`. An exchange of other messages overrides these.

    Attributes:
        name: Name in reports and errors.
        trains: Whether clients refresh (`Client.refresh`) and train between `receive` and `send`.
        down: Whether the server sends a message to clients.
        up: Whether clients send a message back.
        sums: How messages add up, where their sum is all that `aggregate` needs; None where `aggregate` needs each
            message. Where it is given, `aggregate` may receive one update that stands for all clients (`SUM`).
        discloses: What the client's message reveals about its images; None for what `Client.send` declares. A class
            that overrides `send` must declare it again.
        joining: For an exchange before round 1, how a client catches up with it that joins in a later round or comes
            back: it skips the exchange (``"skip"``), or receives its message on joining (``"play"``). With None no
            client can join.
        first_stage: Whether this exchange computes something before round 1 that stays as it is when later stages bring
            other images.
        noised: Whether merging draws noise. Each further merge, of only some of the messages, would then reveal more
            than epsilon accounts for.
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
        """Checks properties of a client's message that its declared form cannot express. Runs on the server.

        Args:
            server: The server.
            client_id: The client that sent the message.
            update: The message, which has the declared form.

        Raises:
            UserError: If the message cannot be that of a client with so many images.
        """
        if self.up:
            cast("Server", server).validate(client_id, update)

    def aggregate(self, server: S, updates: Mapping[int, Update]) -> None:
        """Merges the clients' messages. Runs on the server.

        Args:
            server: The server.
            updates: Updates by client, in client order; never empty.
        """
        if self.up:
            cast("Server", server).aggregate(updates)


def merges_sums(exchange: Exchange, server: Server) -> bool:
    """Returns whether an exchange's server gets the same result from the sum of messages as from single messages."""
    forwards = type(exchange).aggregate is Exchange.aggregate
    return exchange.sums is not None and (server.merges_sums if forwards else True)


def image_sums_of(exchange: Exchange, client: Client) -> ImageSums | None:
    """Returns an exchange's sums over images, or None if what one image adds to them cannot be bounded."""
    return exchange.sums.by_image(client) if exchange.sums and exchange.sums.by_image else None


def disclosed_by(exchange: Exchange, client: Client) -> Disclosures:
    """Returns what a client's message reveals about its images; an empty tuple where the client sends none.

    Raises:
        UserError: If neither the exchange nor the client declares it.
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
    """An exchange in which clients send nothing, for the rounds of a method that does all its work before round 1.

    They receive what the server broadcasts, where its class and the client's say so: clients predict with it.
    """

    name = "nothing"
    up = False

    def broadcast(self, server: Server, client_id: int) -> Message:
        """Returns the server's message; an empty one if its class has none."""
        return server.broadcast(client_id) if type(server).broadcast is not Server.broadcast else {}

    def broadcast_spec(self, client: Client) -> MessageSpec:
        """Declares this message."""
        return client.broadcast_spec() if type(client).broadcast_spec is not Client.broadcast_spec else {}

    def receive(self, client: Client, message: Message) -> None:
        """Loads this message, unless it is empty."""
        if message:
            client.receive(message)


class LeaveOut(Exchange[C, S]):
    """An exchange whose message lets clients remove their own images from the model again."""

    up = False

    def holds(self, client: C, stage: int) -> bool | None:
        """Returns whether the model holds the images of a client's stage; None if it holds only some of them.

        The model holds no images of a stage in which the client was not sampled, or failed.
        """
        return True

    def leave_out(self, client: C, loader: DataLoader) -> None:
        """Removes images from the model in the task's buffers, as if nobody had seen them. Runs on the client.

        Args:
            client: The live client, which has received the message.
            loader: Those of the client's images that are removed.

        Raises:
            UserError: If no model remains without them.
        """
        raise not_there(self, "leave_out")

    def scores(
        self, client: C, loaders: Sequence[DataLoader], score: Callable[[C, DataLoader], Tensor]
    ) -> Iterator[Tensor | None]:
        """Scores images as if nobody had seen them before; the model in the task's buffers is restored afterwards.

        Args:
            client: See `leave_out`.
            loaders: Loaders of the client's images; the images of one loader are left out together.
            score: Computes scores with the model in the task's buffers.

        Yields:
            For each loader, the scores [n] of its images, or None where no model remains without them.
        """
        task = cast("Client", client).task
        kept_buffers = {name: getattr(task, name) for name in task.local_buffers}
        for loader in loaders:
            scores = None
            try:
                self.leave_out(client, loader)
            except UserError:
                pass
            else:
                scores = score(client, loader)
            finally:
                for name, buffer in kept_buffers.items():
                    setattr(task, name, buffer)
            yield scores


@dataclass(frozen=True)
class Exchanges:
    """The exchanges of a method.

    Attributes:
        setup: Exchanges before round 1, each run once with every client; the last is round 0, the one before it -1.
        rounds: Exchanges of every round from 1, in order.
        leave_out: The exchange by which clients remove their own images from the model again. Only its message to the
            clients is sent, after rounds. None where a removal would need new training.
        noised: The exchanges that replace these under differential privacy, each of which is noised; None where they
            are the same.
        evidence: What messages show about single images; audits refuse a method that has no evidence.
    """

    setup: tuple[Exchange, ...] = ()
    rounds: tuple[Exchange, ...] = (Idle(),)
    leave_out: LeaveOut | None = None
    noised: Exchanges | None = None
    evidence: Evidence | None = None

    def __post_init__(self) -> None:
        """Refuses exchanges that are not given as tuples of objects.

        Raises:
            TypeError: If ``setup`` or ``rounds`` is no tuple, or lists a class instead of an object.
            ValueError: If ``rounds`` is empty.
        """
        for name, listed in (("setup", self.setup), ("rounds", self.rounds)):
            if not isinstance(listed, tuple) or any(isinstance(one, type) for one in listed):
                raise TypeError(
                    f"Exchanges: {name}={listed!r} must be a tuple of exchanges, such as (Train(),)"
                )
        if not self.rounds:
            raise ValueError("Exchanges: rounds=() has no exchange; leave it out if clients only receive")

    @property
    def under_noise(self) -> Exchanges:
        """The exchanges of a run with differential privacy, before they are wrapped to add noise."""
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
        """Returns the context of the next exchange after the one of the given context."""
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
        exchanges: The exchanges before round 1 and in every round.
    """

    client: Client
    server: Server
    exchanges: Exchanges

    @property
    def joinable(self) -> bool:
        """Whether clients can join after round 1 has begun."""
        return self.server.admits and self.exchanges.joinable
