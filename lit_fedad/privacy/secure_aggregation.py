"""Secure aggregation in a federation: the server merges the sum of what clients send, and sees nothing else.

The protocol is that of `lit_fedad.privacy`. This module connects it to a federation: which exchanges it supports, how a
client's message becomes numbers that can be masked, how the server turns their sum into one message again, and how the
steps of the protocol are played: offers, masked summands, survivors, shares.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from lightning.fabric import Fabric
from safetensors.torch import save
from torch import Tensor

from lit_fedad.contracts import (
    SUM,
    Client,
    Cohort,
    Exchange,
    Message,
    MessageSpec,
    MessageSums,
    Method,
    SumSpec,
    TensorSpec,
    Update,
    merges_sums,
)
from lit_fedad.core.errors import UserError
from lit_fedad.federation.channel import Channel, Link, Plain
from lit_fedad.federation.client_runner import ClientResult
from lit_fedad.federation.collecting import Collected, Collecting, Turn
from lit_fedad.federation.message_check import check
from lit_fedad.federation.processes import gather, on_first
from lit_fedad.federation.round_report import RoundReport, add_bytes, add_causes, add_counts
from lit_fedad.federation.transport import Outcome, SumStep
from lit_fedad.privacy.fixed_point import Words, decode, encode, fixed_points
from lit_fedad.privacy.keys import KeyPair
from lit_fedad.privacy.messages import FEWEST_MEMBERS, Invitation
from lit_fedad.privacy.protocol import Gathering, Party
from lit_fedad.robust.aggregation import RobustAggregation


@dataclass(frozen=True)
class SecureSum:
    """The settings of secure aggregation.

    Attributes:
        quorum: More than this share of a round's clients must finish. It is at least half, so that one round cannot
            give two sums. The other clients may drop out, as long as three finish: with two, each could compute the
            other's message.

    Raises:
        UserError: If the quorum is below a half, or 1 and more.
    """

    quorum: float = 0.5

    def __post_init__(self) -> None:
        if not 0.5 <= self.quorum < 1:
            raise UserError(
                f"federation.secure_sum.quorum={self.quorum} must be at least 0.5, and below 1: with less, halves of"
                " the clients could give a server two sums"
            )

    def check(
        self, method: Method, channel: Channel, robust: object | None, clients: int, sampled: int
    ) -> None:
        """Checks, before anything runs, that all exchanges of a method are sums, and that nothing needs single uploads.

        Args:
            method: The method.
            channel: Its channel.
            robust: Rules for single messages; None for none.
            clients: Number of clients.
            sampled: Number of clients of a round; that of all clients where no round is played.

        Raises:
            UserError: If an exchange or a setting needs single uploads, or there are too few clients.
        """
        if robust is not None and robust != RobustAggregation():
            raise UserError(
                "federation.secure_sum hides single uploads, and federation.robust judges them: give federation=secure,"
                " or one of the two alone (federation/robust=off)"
            )
        if not isinstance(channel.up.codec, Plain):
            raise UserError(
                "federation.secure_sum sends numbers in fixed point, which no coding shortens: leave"
                " federation.channel.up out"
            )
        if clients < FEWEST_MEMBERS:
            raise UserError(f"federation.secure_sum needs {FEWEST_MEMBERS} clients, and {clients} take part")
        if sampled < FEWEST_MEMBERS and any(
            one.upload_spec(method.client) for one in method.exchanges.rounds
        ):
            raise UserError(
                f"federation.secure_sum needs {FEWEST_MEMBERS} clients in a round, and federation.sampler takes"
                f" {sampled} of {clients}; give federation.sampler.fraction=1"
            )
        for exchange in sending(method):
            if not merges_sums(exchange, method.server):
                raise UserError(
                    f"federation.secure_sum: {type(method.server).__name__} needs each message of exchange"
                    f" '{exchange.name}', not their sum; give a method of sums (docs/privacy.md), or"
                    " federation/secure_sum=null"
                )

    def quorum_of(self, clients: int) -> int:
        """Returns how many of a number of clients must finish.

        Example:
            >>> [SecureSum().quorum_of(clients) for clients in (3, 4, 5, 10)]
            [3, 3, 3, 6]
        """
        return min(clients, max(FEWEST_MEMBERS, math.floor(self.quorum * clients) + 1))


def sending(method: Method) -> list[Exchange]:
    """Lists the exchanges of a method in which clients send a message."""
    exchanges = method.exchanges
    return [one for one in (*exchanges.setup, *exchanges.rounds) if one.upload_spec(method.client)]


@dataclass(frozen=True)
class SumForm:
    """The form of an exchange's sums, which client and server derive from the same information.

    Attributes:
        message_sums: How messages add up.
        spec: The declared form of messages.
        asked: All clients that were asked.
    """

    message_sums: MessageSums
    spec: MessageSpec
    asked: Cohort

    @classmethod
    def of(cls, exchange: Exchange, client: Client, invitation: Invitation) -> SumForm:
        """Derives the form from the exchange and an invitation.

        Raises:
            UserError: If messages of the exchange do not add up.
        """
        message_sums = (
            exchange.sums.by_message(client) if exchange.sums and exchange.sums.by_message else None
        )
        if message_sums is None:
            raise UserError(
                f"the server asks for a sum of exchange '{exchange.name}', whose messages have none"
            )
        return cls(message_sums, exchange.upload_spec(client), invitation.crowd(invitation.members))

    @property
    def sums(self) -> dict[str, SumSpec]:
        """The form of the sums."""
        return self.message_sums.sum_spec(self.spec, self.asked)

    @property
    def masked(self) -> MessageSpec:
        """The form of a masked message: names, sizes and types; values are not limited."""
        types = {32: torch.int32, 64: torch.int64}
        return {
            name: TensorSpec(point.form.shape, types[point.bits], -math.inf, math.inf)
            for name, point in fixed_points(self.sums).items()
        }

    @property
    def elements(self) -> int:
        """Number of elements of a masked message."""
        return sum(math.prod(form.shape) for form in self.sums.values())

    def encode(self, message: Message, client: Cohort) -> Words:
        """Computes a client's summand, in fixed point; rows that it does not send are zeros.

        Raises:
            UserError: If the message does not have the declared form, or a value exceeds the bounds of the sum.
        """
        check(message, self.spec, "the client")
        summands = self.message_sums.summands(message, client, self.asked)
        return encode({name: _filled(summands[name], form) for name, form in self.sums.items()}, self.sums)

    def decode(self, words: Words, answered: Cohort) -> Message:
        """Computes the message that stands for all clients that answered.

        Raises:
            UserError: If the sum cannot come from messages of the declared form.
        """
        sums = decode(words, self.sums)
        message = self.message_sums.from_sums(sums, self.spec, answered, self.asked)
        check(message, self.spec, "all clients together")
        return message


@dataclass(frozen=True)
class Mask:
    """The mask of one message of a client.

    Attributes:
        party: The client's side of the protocol.
        invitation: The invitation that the client has accepted.
        envelopes: The serialised envelopes of the other clients, as the server has passed them on.
    """

    party: Party
    invitation: Invitation
    envelopes: bytes

    def pack(self, message: Message, exchange: Exchange, client: Client) -> bytes:
        """Masks a message and serialises it.

        Raises:
            UserError: If the message does not fit the sum, or an envelope is not valid.
        """
        crowd = self.invitation.crowd([self.party.number])
        words = SumForm.of(exchange, client, self.invitation).encode(message, crowd)
        self.party.mask(words, self.envelopes)
        return save({name: torch.from_numpy(part.view(f"<i{part.itemsize}")) for name, part in words.items()})


def _filled(summand: Tensor, form: SumSpec) -> Tensor:
    """Appends rows of zeros if a client sends fewer rows than the sum has."""
    missing = form.shape[0] - len(summand) if summand.ndim else 0
    return torch.cat([summand, summand.new_zeros(missing, *summand.shape[1:])]) if missing > 0 else summand


class Parties:
    """The side of this process's clients in secure sums of a simulation, which draws the clients' keys itself.

    Args:
        fabric: The processes, which exchange the public keys.
        mine: Clients of this process.
    """

    def __init__(self, fabric: Fabric, mine: Collection[int]) -> None:
        keys = {client: KeyPair() for client in mine}
        publics = {client: pair.public for client, pair in keys.items()}
        registry: dict[int, bytes] = fabric.broadcast(gather(fabric, publics))
        self._parties = {client: Party(client, pair, registry) for client, pair in keys.items()}

    def confer(self, step: SumStep, client: int, blob: bytes) -> bytes:
        """Computes a client's answer to a message of the server; see `Transport.confer`."""
        party = self._parties[client]
        return party.offer(blob) if step == "offer" else party.reveal(blob)

    def mask(self, client: int, envelopes: bytes) -> Mask:
        """Returns the mask that hides a client's message."""
        party = self._parties[client]
        return Mask(party, party.invitation, envelopes)


class Summing(Collecting):
    """Collects the sum of the clients' uploads. The server sees masked summands, and at the end one plain sum.

    Args:
        secure: The settings of secure aggregation.
        collecting: The collector of single uploads, whose connection to clients is used.
    """

    gathering: Gathering
    form: SumForm

    def __init__(self, secure: SecureSum, collecting: Collecting) -> None:
        super().__init__(**vars(collecting))
        self.secure = secure

    def collect(self, turn: Turn) -> Collected:
        """Plays an exchange with the round's clients, and sums what they send; see `Collecting.collect`.

        Spare clients do not replace clients that fail, because masks are shared between the invited clients.

        Returns:
            The sum as the update of `SUM`, and the results of the clients that have played.

        Raises:
            UserError: If too few clients finish, or the policy is to stop at the first failure.
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
        asked = on_first(fabric, lambda: self._add_up(outcome, report))
        shares = transport.confer("reveal", asked)
        on_first(fabric, lambda: updates.update(self._unmask(shares, report)))
        return updates, outcome.values

    def _invite(self, turn: Turn) -> dict[int, bytes]:
        """Begins a sum, and returns the invitations by client."""
        members = {client: turn.sizes[client] for client in turn.report.participants}
        context = turn.context
        place = f"{context.seed}/{context.round}/{context.exchange}/{turn.exchange.name}"
        self.gathering = Gathering(place, members, self.secure.quorum_of(len(members)), self.names)
        invitation = self.gathering.invitation
        self.form = SumForm.of(turn.exchange, self.sender.client, invitation)
        return _count(turn.report.bytes_down, dict.fromkeys(sorted(members), invitation.to_bytes()))

    def _pass_on(self, offers: Outcome[bytes], report: RoundReport) -> dict[int, bytes]:
        """Receives offers, and returns the envelopes for each client that takes part."""
        self._note_failures(offers, report)
        envelopes, refused = self.gathering.take_offers(_count(report.bytes_up, offers.values))
        add_causes(report.refused, refused)
        self._check_left(report, offers, len(envelopes), "take part")
        return _count(report.bytes_down, envelopes)

    def _add_up(self, outcome: Outcome[ClientResult], report: RoundReport) -> dict[int, bytes]:
        """Adds up masked messages, and returns the request for shares by survivor."""
        self._note_failures(outcome, report)
        for client, result in outcome.values.items():
            add_bytes(report.bytes_up, {client: result.blob})
            try:
                self.gathering.add(client, self._words(result.blob))
            except UserError as error:
                add_causes(report.refused, {client: str(error)})
            result.blob = b""  # no longer needed: it is in the sum
        survivors = self.gathering.survivors
        self._check_left(report, outcome, len(survivors), "are left")
        return _count(report.bytes_down, dict.fromkeys(survivors, self.gathering.name_survivors()))

    def _words(self, blob: bytes) -> Words:
        """Reads a masked message, and checks its sizes and types."""
        message = Link(Plain()).unpack(blob, self.form.masked, "the client")
        points = fixed_points(self.form.sums)
        return {name: message[name].numpy().view(point.dtype) for name, point in points.items()}

    def _unmask(self, shares: Outcome[bytes], report: RoundReport) -> dict[int, Update]:
        """Removes the masks from the sum, and returns it as one client's message, under the number `SUM`."""
        self._note_failures(shares, report)
        revealed = len(_count(report.bytes_up, shares.values))
        self._check_left(report, shares, revealed, "have revealed shares")
        survivors = self.gathering.survivors
        answered = self.gathering.invitation.crowd(survivors)
        message = self.form.decode(self.gathering.unmask(shares.values), answered)
        add_counts(report.elements_up, dict.fromkeys(survivors, self.form.elements))
        del self.gathering
        return {SUM: Update(message, answered.images, tuple(sorted(survivors)))}

    def _note_failures(self, outcome: Outcome[Any], report: RoundReport) -> None:
        """Applies the policy for failures, and reports them.

        A client whose masked summand has arrived is in the sum; a later failure of it is not reported.
        """
        named = self.names.titled(outcome.failures)
        self.sampler.check_failures(named, report.round)
        arrived = self.gathering.survivors
        lost = {client: cause for client, cause in outcome.failures.items() if client not in arrived}
        add_causes(report.failures, lost)

    def _check_left(self, report: RoundReport, outcome: Outcome[Any], left: int, what: str) -> None:
        """Refuses a sum of too few clients; the error names a client that failed in the round.

        Args:
            report: The round's report.
            outcome: The outcome of the last step.
            left: Number of clients that are left.
            what: What these clients do, for the error message.
        """
        members, quorum = len(self.gathering.invitation.members), self.gathering.invitation.quorum
        if left < quorum:
            causes = self.names.titled(report.failures | report.refused | outcome.failures)
            cause = next((f"; {client}: {text}" for client, text in causes.items()), "")
            raise UserError(
                f"{left} of {members} clients {what}, and a secure sum needs {quorum}: the round is lost{cause}"
            )


def _count(counts: dict[int, int], blobs: dict[int, bytes]) -> dict[int, bytes]:
    """Adds the bytes of messages to counts by client; returns the messages."""
    add_bytes(counts, blobs)
    return blobs
