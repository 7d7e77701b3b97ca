"""How the server sends its messages to clients, and collects their answers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from lightning.fabric import Fabric

from lit_fedad.contracts import Client, Context, Exchange, Exchanges, Server, Update
from lit_fedad.core.client_names import ClientNames
from lit_fedad.core.errors import RESTORE, UserError, first_line, lies_elsewhere
from lit_fedad.federation.channel import Link
from lit_fedad.federation.client_runner import ClientResult
from lit_fedad.federation.processes import on_first
from lit_fedad.federation.receiver import Receiver
from lit_fedad.federation.round_report import RoundReport, add_bytes, add_causes
from lit_fedad.federation.sampling import ClientSampler
from lit_fedad.federation.transport import Outcome, Sent, Transport


@dataclass
class Sender:
    """The sender of the server's messages, which packs each message once.

    Queries after a round are sent with the message of the next round. Its bytes are kept until the server's state
    changes (`forget`), so that evaluation, calibration, decisions, figures and the next round send the same bytes.

    Attributes:
        server: The method's server, which sends from the first process.
        client: The live client, which knows the declared forms.
        link: The link from the server to clients.
        checkpoint: The checkpoint that the server's state was read from, which may be anybody's; None for a new run.
    """

    server: Server
    client: Client
    link: Link
    fabric: Fabric
    checkpoint: Path | None = None
    _packed: dict[tuple[Any, ...], dict[int, bytes]] = field(default_factory=dict, repr=False)

    def forget(self) -> None:
        """Forgets the packed messages; to be called when the server's state has changed."""
        self._packed.clear()

    def messages(self, exchange: Exchange, clients: Collection[int], context: Context) -> Sent:
        """Serialises the server's messages by client on the first process, for every process.

        Raises:
            UserError: On every process, if a message differs from its declared form, or a server of this library fails
                after it went on from a checkpoint, which is named. A server of one's own may have a defect: its error
                stays, and notes the checkpoint.
        """

        def packed() -> dict[int, bytes]:
            key = (context.round, context.exchange, type(exchange), exchange.name)
            blobs = self._packed.setdefault(key, {})
            if missing := [client for client in clients if client not in blobs]:
                try:
                    blobs |= self.pack(exchange, missing, context)
                except Exception as error:
                    state = self.checkpoint
                    if state is None or lies_elsewhere(error, state, self.server, exchange):
                        raise
                    cause = f"cannot be continued from ({first_line(error)}); {RESTORE}"
                    raise UserError(f"{state}: {cause}") from error
            return {client: blobs[client] for client in clients}

        return Sent(exchange, context, on_first(self.fabric, packed))

    def pack(self, exchange: Exchange, clients: Iterable[int], context: Context) -> dict[int, bytes]:
        """Serialises the server's messages by client; equal messages are serialised once."""
        blobs: dict[int, bytes] = {}
        packed: dict[tuple[Any, ...], bytes] = {}
        kept = []  # keeps all messages alive, so that no two tensors have the same id
        spec = exchange.broadcast_spec(self.client)
        for client in clients:
            message = exchange.broadcast(self.server, client)
            kept.append(message)
            key = tuple((name, id(tensor)) for name, tensor in message.items())
            if key not in packed:
                packed[key] = self.link.pack(message, spec, context, "the server")
            blobs[client] = packed[key]
        return blobs


Collected = tuple[dict[int, Update], dict[int, ClientResult]]
"""The updates to merge, and the results of all clients that answered; on the first process."""


@dataclass(frozen=True)
class Turn:
    """One exchange of a round with the round's clients.

    Attributes:
        exchange: The exchange.
        context: Round and index of the exchange.
        report: The round's report: its participants are asked, and failures and bytes are added to it.
        sizes: Number of training images by client.
        spares: Clients that replace those that fail, in this order.
        scored: Returns those of the given clients that are scored directly after training.
    """

    exchange: Exchange
    context: Context
    report: RoundReport
    sizes: Mapping[int, int]
    spares: list[int]
    scored: Callable[[list[int]], set[int]]


@dataclass
class Collecting:
    """Collects each client's upload separately, and checks it on receipt."""

    sender: Sender
    transport: Transport
    receiver: Receiver
    sampler: ClientSampler
    names: ClientNames
    fabric: Fabric

    def collect(self, turn: Turn) -> Collected:
        """Plays an exchange with the round's clients, and with spare clients in place of those that fail.

        Raises:
            UserError: If a client fails and the policy is to stop.
        """
        report, spares, playing = turn.report, turn.spares, turn.report.participants
        wanted = len(playing)
        updates: dict[int, Update] = {}
        results: dict[int, ClientResult] = {}
        while playing:
            sent = self.sender.messages(turn.exchange, playing, turn.context)
            add_bytes(report.bytes_down, sent.blobs)
            outcome = self.transport.play(sent, turn.scored(playing))
            results |= outcome.values
            # The first process applies the policy for failures, but all processes must end if it stops the run.
            on_first(self.fabric, partial(self._receive, turn, outcome, updates))
            missing = self.fabric.broadcast(wanted - len(updates))
            playing, spares = sorted(spares[:missing]), spares[missing:]
        return updates, results

    def _receive(self, turn: Turn, outcome: Outcome[ClientResult], updates: dict[int, Update]) -> None:
        """Checks the uploads, and adds those that can be used to the updates."""
        for client, result in outcome.values.items():
            add_bytes(turn.report.bytes_up, {client: result.blob})  # refused uploads count too
            try:
                updates[client] = self.receiver.open(turn.exchange, client, result.blob, turn.sizes[client])
            except UserError as error:
                add_causes(turn.report.refused, {client: str(error)})
        self.sampler.check_failures(self.names.titled(outcome.failures), turn.report.round)
        add_causes(turn.report.failures, outcome.failures)

    def catch_up(
        self, exchanges: Exchanges, context: Context, holders: Sequence[int], history: Sequence[RoundReport]
    ) -> dict[int, str]:
        """Lets clients catch up with the exchanges before round 1 that they missed and that later rounds depend on.

        Afterwards all holders of images take part, except those that fail to catch up; they try again before the next
        round. Clients that have caught up, and the bytes, are added to the reports of the missed exchanges.

        Returns:
            Causes by client that failed, in every process.

        Raises:
            UserError: If the policy for failures is to stop.
        """
        failed: dict[int, str] = {}
        # Only the first process has the reports of the rounds that this command has run.
        for round, missed in self.fabric.broadcast(clients_behind(exchanges, holders, history)).items():
            late = [client for client in missed if client not in failed]
            if not late:
                continue
            exchange, past = exchanges.of_round(round)[0], replace(context, round=round)
            self.sender.server.context = past
            sent = self.sender.messages(exchange, late, past)
            outcome = self.transport.play(sent, ())
            self.sender.forget()
            done, causes = self.fabric.broadcast((list(outcome.values), outcome.failures))
            self.transport.settle(done)
            failed |= causes
            for report in (earlier for earlier in history if earlier.round == round):
                report.participants += done
                add_bytes(report.bytes_down, sent.blobs)
                add_bytes(report.bytes_up, {c: result.blob for c, result in outcome.values.items()})
        on_first(self.fabric, partial(self.sampler.check_failures, self.names.titled(failed), context.round))
        return failed


def clients_behind(
    exchanges: Exchanges, holders: Sequence[int], history: Sequence[RoundReport]
) -> dict[int, list[int]]:
    """Lists the holders of images that must still catch up with exchanges before round 1.

    Returns:
        By round number of the exchange, the clients that missed it; only for exchanges that clients must catch up with
        (`Exchange.joining`).
    """
    return {
        report.round: [client for client in holders if client not in {*report.participants, *report.refused}]
        for report in history
        if report.round <= 0 and exchanges.of_round(report.round)[0].joining == "play"
    }
