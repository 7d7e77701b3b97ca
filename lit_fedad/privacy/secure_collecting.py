"""The exchanges of a federation whose uploads are summed securely: offers, masked sums, survivors, shares."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from lightning.fabric import Fabric
from safetensors.torch import load

from lit_fedad.contracts import SUM, Message, Update
from lit_fedad.core.errors import UserError
from lit_fedad.federation.client_runner import ClientResult
from lit_fedad.federation.collecting import Collected, Collecting, Turn
from lit_fedad.federation.message_check import check
from lit_fedad.federation.processes import gather, on_first
from lit_fedad.federation.round_report import RoundReport, add_bytes, add_causes, add_counts
from lit_fedad.federation.transport import Outcome, SumStep
from lit_fedad.privacy.fixed_point import Words, fixed_points
from lit_fedad.privacy.keys import KeyPair
from lit_fedad.privacy.protocol import Gathering, Party
from lit_fedad.privacy.secure_aggregation import Mask, SecureSum, SumForm


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


class Summing(Collecting):
    """The server's conduct of summed exchanges. It holds masked sums, and one plain sum at the end: that of all.

    Args:
        secure: The settings.
        collecting: The way to clients and back.
    """

    gathering: Gathering
    form: SumForm
    causes: dict[int, str]  # by client that dropped out, or whose message was refused

    def __init__(self, secure: SecureSum, collecting: Collecting) -> None:
        super().__init__(**vars(collecting))
        self.secure = secure

    def collect(self, turn: Turn) -> Collected:
        """Plays an exchange with the round's clients, and sums what they send; see `Collecting.collect`.

        No spare client takes the place of one that fails: masks are between those that were asked.

        Returns:
            The sum as the update of `SUM`, and the results of the clients in it.

        Raises:
            UserError: If too few clients finish, or the policy is to stop at the first that fails.
        """
        updates: dict[int, Update] = {}
        fabric, transport, report = self.fabric, self.transport, turn.report
        sent = self.sender.messages(turn.exchange, report.participants, turn.context)
        invited = on_first(fabric, lambda: self._invite(turn))
        offers = transport.confer("offer", invited)
        envelopes = on_first(fabric, lambda: self._pass_on(offers, report))
        sent = sent._replace(blobs={client: sent.blobs[client] for client in envelopes})
        add_bytes(report.bytes_down, sent.blobs)
        outcome = transport.play(sent, turn.scored(list(envelopes)), envelopes)
        asked = on_first(fabric, lambda: self._take(outcome, report))
        shares = transport.confer("reveal", asked)
        on_first(fabric, lambda: updates.update(self._finish(shares, report)))
        return updates, outcome.values

    def _invite(self, turn: Turn) -> dict[int, bytes]:
        """Begins a sum, and returns the invitations by client."""
        members = {client: turn.sizes[client] for client in turn.report.participants}
        context = turn.context
        place = f"{context.seed}/{context.round}/{context.exchange}/{turn.exchange.name}"
        self.gathering = Gathering(place, members, self.secure.quorum_of(len(members)), self.names)
        invitation, self.causes = self.gathering.invitation, dict[int, str]()
        self.form = SumForm.of(turn.exchange, self.sender.client, invitation)
        return _count(turn.report.bytes_down, dict.fromkeys(sorted(members), invitation.to_bytes()))

    def _pass_on(self, offers: Outcome[bytes], report: RoundReport) -> dict[int, bytes]:
        """Takes offers, and returns the envelopes for each client that goes on."""
        self._note(offers, report)
        envelopes, refused = self.gathering.take_offers(_count(report.bytes_up, offers.values))
        self._refuse(refused, report)
        self._check_left(len(envelopes), "take part")
        return _count(report.bytes_down, envelopes)

    def _take(self, outcome: Outcome[ClientResult], report: RoundReport) -> dict[int, bytes]:
        """Adds masked messages up, and returns the question for shares by survivor."""
        self._note(outcome, report)
        for client, result in outcome.values.items():
            add_bytes(report.bytes_up, {client: result.blob})
            try:
                self.gathering.add(client, self._words(result.blob))
            except UserError as error:
                self._refuse({client: str(error)}, report)
            result.blob = b""  # it is in the sum
        survivors = self.gathering.survivors
        self._check_left(len(survivors), "are left")
        return _count(report.bytes_down, dict.fromkeys(survivors, self.gathering.name_survivors()))

    def _words(self, blob: bytes) -> Words:
        """Checks the sizes and types of a masked message."""
        try:
            message: Message = load(blob)
        except Exception as error:
            raise UserError(f"the client sent bytes that hold no message ({type(error).__name__})") from error
        check(message, self.form.masked, "the client")
        points = fixed_points(self.form.sums)
        return {name: message[name].numpy().view(point.dtype) for name, point in points.items()}

    def _finish(self, shares: Outcome[bytes], report: RoundReport) -> dict[int, Update]:
        """Takes the masks off the sum, and returns it as one client's message, under the number `SUM`."""
        self._note(shares, report)
        self._check_left(len(_count(report.bytes_up, shares.values)), "have revealed shares")
        survivors = self.gathering.survivors
        answered = self.gathering.invitation.crowd(survivors)
        message = self.form.decode(self.gathering.unmask(shares.values), answered)
        add_counts(report.elements_up, dict.fromkeys(survivors, self.form.elements))
        del self.gathering
        return {SUM: Update(message, answered.images, tuple(sorted(survivors)))}

    def _note(self, outcome: Outcome[Any], report: RoundReport) -> None:
        """Applies the policy for failures; a client whose masked sum has arrived is in it, whatever comes after."""
        named = self.names.titled(outcome.failures)
        self.sampler.check_failures(named, report.round)
        arrived = self.gathering.survivors
        self.causes |= outcome.failures
        left = {client: cause for client, cause in outcome.failures.items() if client not in arrived}
        add_causes(report.failures, left)

    def _refuse(self, refused: dict[int, str], report: RoundReport) -> None:
        self.causes |= refused
        add_causes(report.refused, refused)

    def _check_left(self, left: int, what: str) -> None:
        members, quorum = len(self.gathering.invitation.members), self.gathering.invitation.quorum
        if left < quorum:
            causes = self.names.titled(self.causes)
            cause = next((f"; {client}: {text}" for client, text in causes.items()), "")
            raise UserError(
                f"{left} of {members} clients {what}, and a secure sum needs {quorum}: the round is lost{cause}"
            )


def _count(counts: dict[int, int], blobs: dict[int, bytes]) -> dict[int, bytes]:
    """Adds the bytes of messages to counts by client; returns the messages."""
    add_bytes(counts, blobs)
    return blobs
