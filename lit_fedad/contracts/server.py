"""The server side of a method."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, cast

from lightning.fabric import Fabric

from lit_fedad.contracts.client import Client
from lit_fedad.contracts.context import Context
from lit_fedad.contracts.message import Message, Update
from lit_fedad.core.errors import UserError


class Server:
    """The server side of one method.

    Attributes:
        fabric: Where the server computes and how precisely; None where nothing was launched.
        context: The round, and the exchange, that is running.
        kept: Names of all attributes that a later round depends on, beside those of base classes; checkpoints hold
            them.
    """

    fabric: Fabric | None = None
    kept: ClassVar[tuple[str, ...]] = ()

    def __init__(self) -> None:
        self.context = Context(seed=0, round=0)

    def register_clients(self, sizes: Mapping[int, int]) -> None:
        """Registers all clients that hold images, once, before a run begins or is resumed.

        Args:
            sizes: Training images by client.
        """

    def begin(self, context: Context) -> None:
        """Starts an exchange: sets seed, round and exchange."""
        self.context = context

    def broadcast(self, client_id: int) -> Message:
        """Returns the message that a client trains with."""
        raise NotImplementedError

    def validate(self, client_id: int, update: Update) -> None:
        """Checks what the declared form of a client's message after training cannot say.

        Args:
            client_id: The client that sent it.
            update: Its message, of the declared form.

        Raises:
            UserError: If the message cannot be that of a client with so many images.
        """

    def aggregate(self, updates: Mapping[int, Update]) -> None:
        """Merges the messages that clients sent after training.

        Args:
            updates: By client, in client order; never empty.
        """
        raise NotImplementedError

    def diagnostics(self) -> dict[str, float]:
        """Returns scalars to track after a round, by name."""
        return {}

    def warnings(self) -> list[str]:
        """Returns warnings for the user after a round, one line each."""
        return []


class AdditiveServer(Server):
    """A server that may merge a sum of messages, where its clients are `AdditiveClient`.

    Attributes:
        adds_up: Whether `aggregate` comes to the same from one message that stands for several clients as from theirs.
            A class that overrides `aggregate` declares it anew.
    """

    adds_up: bool


class AttackableServer(Server):
    """A server whose single uploads can be turned into predictors, which privacy attacks evaluate."""

    def adversary_view(self, update: Update, client: Client) -> None:
        """Turns a client into the best predictor that an observer of its upload can build before the upload is merged.

        The observer has the round's broadcast and the clients' initial state, but no personal state.

        Args:
            update: The client's upload.
            client: The live client, which has just received this round's broadcast.

        Raises:
            UserError: If no predictor for single images can be built from the upload.
        """
        raise NotImplementedError


def takes_sums(server: Server) -> bool:
    """Returns `AdditiveServer.adds_up`, as far as it was declared for the server's own `aggregate`.

    A class that merges in another way than its base, and says nothing, is taken to need every message.
    """
    for cls in type(server).__mro__:
        if "adds_up" in vars(cls):
            return cast("AdditiveServer", server).adds_up
        if "aggregate" in vars(cls):
            return False
    return False


def nothing_to_attack(client: Client) -> UserError:
    """Builds the error for methods whose uploads cannot score images."""
    return UserError(
        f"{type(client).__name__}: what its clients send scores no image: there is nothing to attack"
    )
