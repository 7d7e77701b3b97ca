"""The server side of a method."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning.fabric import Fabric
from torch import Tensor

from lit_fedad.contracts.client import Client
from lit_fedad.contracts.context import Context, phase
from lit_fedad.contracts.message import Message, Payload, Update
from lit_fedad.errors import UserError


class Server:
    """The server side of one method.

    Args:
        setup: The client's `Client.setup_phases`: exchanges before round 1. They are numbered up to 0, take in every
            client and train nothing: ``("statistics", "memory")`` are rounds -1 and 0.
        exchanges: The client's `Client.exchanges`, which every round from 1 is made of.

    Attributes:
        fabric: Where the server computes and how precisely; None where nothing was launched.
    """

    fabric: Fabric | None = None

    def __init__(self, setup: tuple[str, ...] = (), exchanges: tuple[str, ...] = ("train",)) -> None:
        self.setup, self.exchanges = setup, exchanges
        self.context = Context(seed=0, round=0)

    @property
    def phase(self) -> str:
        """The name of this exchange: one of ``setup`` or of ``exchanges``."""
        return phase(self.context, self.setup, self.exchanges)

    def enrol(self, sizes: Mapping[int, int]) -> None:
        """Learns once, before a run begins or goes on, who the clients are.

        Args:
            sizes: Training images by client, of all clients that hold any.
        """

    def begin(self, context: Context) -> None:
        """Starts a round."""
        self.context = context

    def download_payload(self) -> Payload:
        """The form of what this round's `broadcast` sends."""
        raise NotImplementedError

    def upload_payload(self) -> Payload:
        """The form of what clients send in this round."""
        raise NotImplementedError

    def broadcast(self, client_id: int) -> Message:
        """What a client is sent at the start of the round."""
        raise NotImplementedError

    def aggregate(self, updates: Mapping[int, Update]) -> None:
        """Takes in what clients sent.

        Args:
            updates: By client, in client order; never empty.
        """
        raise NotImplementedError

    def diagnostics(self) -> dict[str, float]:
        """Numbers worth a curve, after `aggregate`."""
        return {}

    def shared_images(self) -> Mapping[int, tuple[Tensor, Tensor]]:
        """Images that clients have shared, for pictures: by round, uint8 [n, C, H, W] and labels [n]."""
        return {}

    def observe(self, update: Update, client: Client) -> None:
        """Makes of a client the best predictor that an observer of its upload can build. Called before `aggregate`.

        The observer knows the round's broadcast and how clients begin, but no personal state.

        Args:
            update: What the client sent to be merged.
            client: The live client, which has just received this round's broadcast.

        Raises:
            UserError: If the upload says nothing of single images.
        """
        raise UserError(
            f"{type(client).__name__}: what its clients send scores no image: there is nothing to attack"
        )

    def warnings(self) -> list[str]:
        """What a user should be told after `aggregate`, one line each."""
        return []

    def state_dict(self) -> dict[str, Any]:
        """All that a later round depends on."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores `state_dict`."""
