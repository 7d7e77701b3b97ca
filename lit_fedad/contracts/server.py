"""The server side of a method."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from lightning.fabric import Fabric

from lit_fedad.contracts.client import Client
from lit_fedad.contracts.context import Context
from lit_fedad.contracts.kept_state import read_kept, write_kept
from lit_fedad.contracts.message import Message, Update
from lit_fedad.errors import UserError


class Server:
    """The server side of one method.

    Attributes:
        fabric: Where the server computes and how precisely; None where nothing was launched.
        context: The round, and the exchange, that is running.
        kept: Names of the attributes that a later round depends on, beside those of base classes.
    """

    fabric: Fabric | None = None
    kept: ClassVar[tuple[str, ...]] = ()

    def __init__(self) -> None:
        self.context = Context(seed=0, round=0)

    def register_clients(self, sizes: Mapping[int, int]) -> None:
        """Takes note of all clients that hold images, once, before a run begins or is resumed.

        Args:
            sizes: Training images by client.
        """

    def begin(self, context: Context) -> None:
        """Starts an exchange."""
        self.context = context

    def broadcast(self, client_id: int) -> Message:
        """Returns what a client is sent to train with."""
        raise NotImplementedError

    def aggregate(self, updates: Mapping[int, Update]) -> None:
        """Merges what clients sent after training.

        Args:
            updates: By client, in client order; never empty.
        """
        raise NotImplementedError

    def diagnostics(self) -> dict[str, float]:
        """Returns numbers to track, after a round."""
        return {}

    def warnings(self) -> list[str]:
        """Returns what a user should be told after a round, one line each."""
        return []

    def state_dict(self) -> dict[str, Any]:
        """Reads all that a later round depends on: the attributes in ``kept``."""
        return read_kept(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores `state_dict`."""
        write_kept(self, state)


class AttackableServer(Server):
    """A server whose uploads, one by one, can be turned into predictors: what privacy attacks judge."""

    def adversary_view(self, update: Update, client: Client) -> None:
        """Turns a client into the best predictor that an observer of its upload can build, before it is merged.

        The observer knows the round's broadcast and the clients' initial state, but no personal state.

        Args:
            update: What the client sent to be merged.
            client: The live client, which has just received this round's broadcast.

        Raises:
            UserError: If the upload says nothing about single images.
        """
        raise nothing_to_attack(client)


def nothing_to_attack(client: Client) -> UserError:
    """Builds the error for methods whose uploads score no image."""
    return UserError(
        f"{type(client).__name__}: what its clients send scores no image: there is nothing to attack"
    )
