"""What one client does in an exchange: from received bytes and local data to the bytes it sends."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
from lightning.fabric import Fabric
from torch.utils.data import DataLoader

from lit_fedad.contracts import Client, Context, Exchange, Message
from lit_fedad.contracts.state import load_state
from lit_fedad.federation.channel import Channel
from lit_fedad.federation.client_pool import State
from lit_fedad.federation.local_training import own_scale


class ClientData(Protocol):
    """Training data by client."""

    @property
    def milestones(self) -> frozenset[int]:
        """Rounds after which clients go on to other stages: these are evaluated."""

    @property
    def stages(self) -> Mapping[int, int]:
        """Stage of each client, from 0, where its data come in several."""

    @property
    def sizes(self) -> Mapping[int, int]:
        """Training images by client."""

    def client_loader(self, client: int, generator: torch.Generator, shuffle: bool = True) -> DataLoader:
        """Returns training batches of a client."""

    def at(self, round: int) -> ClientData:
        """Returns what the clients hold in a round."""


class Mask(Protocol):
    """What a client hides its message with, where uploads are summed securely."""

    def pack(self, message: Message, exchange: Exchange, client: Client) -> bytes:
        """Turns a message into a masked one, serialised."""


@dataclass
class ClientResult:
    """What a client's part in an exchange gave.

    Attributes:
        scalars: Loss and other scalars of training.
        trained: Value of `Evaluator.score` directly after training; None where the client was not scored.
    """

    blob: bytes = b""
    scalars: dict[str, float] = field(default_factory=dict)
    trained: Any = None


@dataclass(frozen=True)
class ClientRunner:
    """Plays the live client's part in exchanges, independently of the server and of other clients.

    Attributes:
        channel: Encodes and checks messages in both directions.
    """

    client: Client
    channel: Channel
    fabric: Fabric

    def activate(self, exchange: Exchange, context: Context, state: State, blob: bytes) -> Message:
        """Loads one client's state and the server's message into the live client.

        Raises:
            UserError: If the message differs from the declared form.
        """
        client = self.client
        client.context, client.task.round = context, context.round
        load_state(client, state)
        message = self.channel.down.unpack(blob, exchange.broadcast_spec(client), "the server")
        exchange.receive(client, message)
        if self.fabric.device.type != "cpu":  # states and messages are loaded there
            client.to(self.fabric.device)
        client.eval()
        return message

    def play(self, exchange: Exchange, data: ClientData, mask: Mask | None = None) -> ClientResult:
        """Trains the activated client where the exchange includes training, and serialises its upload.

        The caller stores the client's new state (`state_of`).

        Raises:
            UserError: If training diverges, or the upload differs from the declared form.
        """
        client, context, result = self.client, self.client.context, ClientResult()
        assert context.client is not None
        if exchange.trains:
            client.refresh(ordered_loader(data, context.client))
            loader = data.client_loader(context.client, context.generator("batches"))
            with context.seeded("fit"), own_scale(self.fabric, client.loss_scale) as scaler:
                result.scalars = exchange.train(client, loader, self.fabric)
            client.loss_scale = scaler.state_dict() if scaler else None
        with context.seeded("send"):
            message = exchange.send(client, ordered_loader(data, context.client))
        if mask is not None:
            result.blob = mask.pack(message, exchange, client)
        else:
            result.blob = self.channel.up.pack(message, exchange.upload_spec(client), context, "the client")
        return result


def ordered_loader(data: ClientData, client: int) -> DataLoader:
    """Returns a client's training batches in a fixed order."""
    return data.client_loader(client, torch.Generator(), shuffle=False)


def pose_client(client: Client, which: Literal["own", "server"], lent: Message, data: ClientData) -> None:
    """Sets the activated client up as it predicts."""
    assert client.context.client is not None
    client.deploy(which)
    if lent:
        client.task.load_state_dict(lent, strict=False)
    client.refresh(ordered_loader(data, client.context.client), predicts=True)
