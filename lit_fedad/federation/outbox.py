"""The server's end of a broadcast: messages are checked and serialised, equal ones once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from lightning.fabric import Fabric

from lit_fedad.contracts import Client, Context, Exchange, Server
from lit_fedad.federation.channel import Link
from lit_fedad.federation.processes import on_first


@dataclass(frozen=True)
class Outbox:
    """The sender of the server's messages.

    Attributes:
        server: The method's server, which sends from the first process.
        client: The live client, for declared forms.
        link: The link from the server to clients.
        fabric: The processes.
    """

    server: Server
    client: Client
    link: Link
    fabric: Fabric

    def messages(self, exchange: Exchange, clients: Iterable[int], context: Context) -> dict[int, bytes]:
        """Serialises the server's messages by client on the first process, for every process.

        Raises:
            UserError: On every process, if a message differs from its declared form.
        """
        return on_first(self.fabric, lambda: self.pack(exchange, clients, context))

    def pack(self, exchange: Exchange, clients: Iterable[int], context: Context) -> dict[int, bytes]:
        """Serialises the server's messages by client; equal messages are serialised once."""
        blobs: dict[int, bytes] = {}
        packed: dict[tuple[Any, ...], bytes] = {}
        kept = []  # so that no two tensors have the same id
        spec = exchange.broadcast_spec(self.client)
        for client in clients:
            message = exchange.broadcast(self.server, client)
            kept.append(message)
            key = tuple((name, id(tensor)) for name, tensor in message.items())
            if key not in packed:
                packed[key] = self.link.pack(message, spec, context, "the server")
            blobs[client] = packed[key]
        return blobs
