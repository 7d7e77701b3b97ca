"""What an observer of messages knows: a client with what was sent to it, and what can be made of its upload."""

from __future__ import annotations

from dataclasses import replace

from lit_fedad.contracts import AttackableServer, Client, Message, Update, nothing_to_attack
from lit_fedad.federation.client_pool import detached
from lit_fedad.federation.loop import Federation


def observe(federation: Federation, client: int) -> Message:
    """Turns the live client into one that knows no more than what an observer of its messages knows.

    Args:
        federation: The federation, within an exchange.
        client: Number of the client. It has just received the message of the server's exchange, and its personal
            state is that of a client before the run.

    Returns:
        The server's message to it.
    """
    context = federation.server.context
    exchange = federation.exchanges.at(context)
    blob = federation.outbox.pack(exchange, [client], context)[client]
    stage = federation.data.at(min(context.round, federation.rounds)).stages[client]
    return federation.turn.activate(
        exchange, replace(context, client=client, stage=stage), detached(federation.pool.initial), blob
    )


def adversary_view(federation: Federation, client: int, update: Update) -> Client:
    """Turns the live client into the predictor that an observer of an upload can build (`AttackableServer`).

    Args:
        federation: The federation, within an exchange.
        client: Number of the client that sent the upload in this exchange.
        update: The upload.

    Returns:
        The live client.

    Raises:
        UserError: If uploads of this method cannot score images.
    """
    if not isinstance(federation.server, AttackableServer):
        raise nothing_to_attack(federation.client)
    observe(federation, client)
    federation.server.adversary_view(update, federation.client)
    federation.client.eval()
    return federation.client
