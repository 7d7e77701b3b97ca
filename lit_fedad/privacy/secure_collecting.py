"""The exchanges of a federation whose uploads are summed securely: offers, masked sums, survivors, shares."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from lightning.fabric import Fabric

from lit_fedad.contracts import Context, Exchange, Update
from lit_fedad.core.errors import UserError
from lit_fedad.federation.client_runner import ClientResult
from lit_fedad.federation.collecting import Collected, Collecting
from lit_fedad.federation.processes import gather, on_first
from lit_fedad.federation.round_report import RoundReport, add_counts
from lit_fedad.federation.transport import Outcome, SumStep
from lit_fedad.privacy.keys import KeyPair
from lit_fedad.privacy.party import Party
from lit_fedad.privacy.secure_aggregation import Mask, SecureSum, SumForm, SumReceiver


class Parties:
    """The parts of this process's clients in secure sums, with keys that are drawn here: a simulation's registry.

    Args:
        fabric: The processes, which tell each other the public keys.
        mine: Clients of this process.
    """

    def __init__(self, fabric: Fabric, mine: Collection[int]) -> None:
        keys = {client: KeyPair() for client in mine}
        own = {client: pair.public for client, pair in keys.items()}
        registry: dict[int, bytes] = fabric.broadcast(gather(fabric, own))
        self._parties = {client: Party(client, pair, registry) for client, pair in keys.items()}

    def confer(self, step: SumStep, client: int, blob: bytes) -> bytes:
        """Answers a message of the server; see `Transport.confer`."""
        party = self._parties[client]
        return party.offer(blob) if step == "offer" else party.reveal(blob)

    def mask(self, client: int, envelopes: bytes) -> Mask:
        """Returns what a client masks its message with."""
        return Mask(self._parties[client], envelopes)


@dataclass
class Summing(Collecting):
    """The server's conduct of summed exchanges. It holds masked sums, and one plain sum at the end: that of all.

    Attributes:
        secure: The settings.
        sums: Receives the current exchange's sum.
    """

    secure: SecureSum
    sums: SumReceiver | None = None

    def collect(
        self,
        exchange: Exchange,
        context: Context,
        report: RoundReport,
        sizes: Mapping[int, int],
        spares: list[int],
        scored: Callable[[list[int]], set[int]],
    ) -> Collected:
        """Plays an exchange with the round's clients, and sums what they send; see `Collecting.collect`.

        No spare client takes the place of one that fails: masks are between those that were asked.

        Returns:
            The sum as the update of `SUM`, and the results of the clients in it.

        Raises:
            UserError: If too few clients finish, or the policy is to stop at the first that fails.
        """
        updates: dict[int, Update] = {}
        fabric, transport = self.fabric, self.transport
        blobs = self.sender.messages(exchange, report.participants, context)
        add_counts(report.bytes_down, {client: len(blob) for client, blob in blobs.items()})
        members = {client: sizes[client] for client in blobs}
        invited = on_first(fabric, lambda: self._begin(exchange, context, members))
        offers = transport.confer("offer", invited)
        envelopes = on_first(fabric, lambda: self._pass_on(offers, report))
        outcome = transport.play(
            exchange,
            context,
            {client: blobs[client] for client in envelopes},
            scored(list(envelopes)),
            envelopes,
        )
        asked = on_first(fabric, lambda: self._take(outcome, report))
        shares = transport.confer("reveal", asked)
        on_first(fabric, lambda: updates.update(self._finish(shares, report)))
        return updates, outcome.values

    def _begin(self, exchange: Exchange, context: Context, sizes: Mapping[int, int]) -> dict[int, bytes]:
        gathering = self.secure.gather(exchange, context, sizes, self.names)
        form = SumForm.of(exchange, self.sender.client, gathering.invitation)
        self.sums = SumReceiver(gathering, form)
        return self.sums.invite()

    def _pass_on(self, offers: Outcome[bytes], report: RoundReport) -> dict[int, bytes]:
        receiver = self._note(offers, report)
        envelopes = receiver.pass_on(offers.values)
        report.refuse(receiver.causes)
        return envelopes

    def _take(self, outcome: Outcome[ClientResult], report: RoundReport) -> dict[int, bytes]:
        receiver, refused = self._note(outcome, report), {}
        for client, result in outcome.values.items():
            try:
                receiver.take(client, result.blob)
            except UserError as error:
                refused[client] = str(error)
            result.blob = b""  # it is in the sum
        receiver.causes |= refused
        report.refuse(refused)
        return receiver.ask_survivors()

    def _finish(self, shares: Outcome[bytes], report: RoundReport) -> dict[int, Update]:
        receiver = self._note(shares, report)
        updates = receiver.finish(shares.values)
        add_counts(report.bytes_up, receiver.bytes_up)
        add_counts(report.bytes_down, receiver.bytes_down)
        add_counts(report.elements_up, dict.fromkeys(receiver.gathering.survivors, receiver.form.elements))
        self.sums = None
        return updates

    def _note(self, outcome: Outcome[Any], report: RoundReport) -> SumReceiver:
        """Applies the policy for failures; a client whose masked sum has arrived is in it, whatever comes after."""
        assert self.sums is not None
        self.sampler.check_failures(self.names.titled(outcome.failures), report.round)
        arrived = self.sums.gathering.survivors
        self.sums.causes |= outcome.failures
        report.fail({client: cause for client, cause in outcome.failures.items() if client not in arrived})
        return self.sums
