"""One client's turn in an exchange, on whatever machine the client is: bytes and its own data in, bytes out."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.fabric import Fabric
from torch.utils.data import DataLoader

from lit_fedad.contracts import Client, Context, Exchange, Message
from lit_fedad.federation.channel import Channel, elements
from lit_fedad.federation.client_data import ClientData
from lit_fedad.federation.client_pool import State


@dataclass
class ClientResult:
    """What comes of a client's turn.

    Attributes:
        blob: The serialised upload.
        elements: How many numbers it holds.
        scalars: Loss and other scalars of its training.
        trained: What the evaluator made of the client as it was after training, where it asked.
        error: Cause of its failure; None for a turn that went well.
    """

    blob: bytes = b""
    elements: int = 0
    scalars: dict[str, float] = field(default_factory=dict)
    trained: Any = None
    error: str | None = None


@dataclass(frozen=True)
class Turn:
    """Plays turns of a live client; knows neither the server nor other clients.

    Attributes:
        client: The live client.
        channel: Codes and checks messages, both ways.
        fabric: Device and precision.
    """

    client: Client
    channel: Channel
    fabric: Fabric

    def activate(self, exchange: Exchange, context: Context, state: State, blob: bytes) -> Message:
        """Turns the live client into one client that has just received the server's message.

        Args:
            exchange: The running exchange.
            context: Round and client.
            state: The client's personal state.
            blob: The serialised message of the server.

        Returns:
            The message.

        Raises:
            UserError: If the message is not of the declared form.
        """
        client = self.client
        client.begin(context)
        client.load_personal_state(state)
        message = self.channel.down.unpack(blob, exchange.broadcast_spec(client), "the server")
        exchange.receive(client, message)
        client.to(self.fabric.device)
        client.eval()
        return message

    def play(self, exchange: Exchange, data: ClientData) -> ClientResult:
        """Trains the activated client where the exchange trains, and serialises what it sends.

        The client's new personal state is `Client.personal_state` afterwards; keeping it is the caller's.

        Args:
            exchange: The running exchange.
            data: Training data of this round.

        Raises:
            UserError: If training diverges, or what is to be sent is not of the declared form.
        """
        client, context, result = self.client, self.client.context, ClientResult()
        assert context.client is not None
        if exchange.trains:
            client.refresh(ordered_loader(data, context.client))
            loader = data.client_loader(context.client, context.generator("batches"))
            with context.seeded("fit"):
                result.scalars = exchange.train(client, loader, self.fabric)
        with context.seeded("send"):
            message = exchange.send(client, ordered_loader(data, context.client))
        result.blob = self.channel.up.pack(message, exchange.upload_spec(client), context, "the client")
        result.elements = elements(message)
        return result


def ordered_loader(data: ClientData, client: int) -> DataLoader:
    """Returns a client's training batches in a fixed order."""
    return data.client_loader(client, torch.Generator(), shuffle=False)
