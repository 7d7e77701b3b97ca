"""Secure aggregation as a stage of an exchange: the server merges the sum of what clients send, and sees nothing else.

The protocol is that of `lit_fedad.privacy`. Here is what it means for a federation: which exchanges it fits, how a
client's message becomes numbers that can be masked, and how the server comes from their sum to one message again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from safetensors.torch import save
from torch import Tensor

from lit_fedad.contracts import (
    Client,
    Cohort,
    Exchange,
    Message,
    MessageSpec,
    MessageSums,
    Method,
    SumSpec,
    TensorSpec,
    merges_sums,
)
from lit_fedad.core.errors import UserError
from lit_fedad.federation.channel import Channel, Plain
from lit_fedad.federation.message_check import check
from lit_fedad.privacy.fixed_point import Words, decode, encode, fixed_points
from lit_fedad.privacy.messages import FEWEST_MEMBERS, Invitation
from lit_fedad.privacy.protocol import Party
from lit_fedad.robust.aggregation import RobustAggregation


@dataclass(frozen=True)
class SecureSum:
    """The settings of secure aggregation.

    Attributes:
        quorum: Share of a round's clients, more of which must finish: at least half, so that no two sums come of one
            round. The others may drop out, as long as three finish: each of two knows the other's message.

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

    def check(self, method: Method, channel: Channel, robust: object | None, clients: int) -> None:
        """Checks, before anything runs, that all exchanges of a method are sums, and that nothing needs single uploads.

        Raises:
            UserError: If an exchange needs each upload, or a setting does.
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
        for exchange in sending(method):
            if not merges_sums(exchange, method.server):
                raise UserError(
                    f"federation.secure_sum: {type(method.server).__name__} needs each message of exchange"
                    f" '{exchange.name}', not their sum; give a method of sums (docs/privacy.md), or"
                    " federation/secure_sum=null"
                )

    def quorum_of(self, clients: int) -> int:
        """Returns the fewest of a number of clients that must finish.

        Example:
            >>> [SecureSum().quorum_of(clients) for clients in (3, 4, 5, 10)]
            [3, 3, 3, 6]
        """
        return min(clients, max(FEWEST_MEMBERS, math.floor(self.quorum * clients) + 1))


def sending(method: Method) -> list[Exchange]:
    """Lists the exchanges of a method in which clients send something."""
    exchanges = method.exchanges
    return [one for one in (*exchanges.setup, *exchanges.rounds) if one.upload_spec(method.client)]


@dataclass(frozen=True)
class SumForm:
    """The form of an exchange's sums, which client and server derive alike.

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
        return cls(message_sums, exchange.upload_spec(client), invitation.asked)

    @property
    def sums(self) -> dict[str, SumSpec]:
        """The form of the sums."""
        return self.message_sums.sum_spec(self.spec, self.asked)

    @property
    def masked(self) -> MessageSpec:
        """The form of a masked message: names, sizes and types. Values can be any."""
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
        """Computes what a client adds, in fixed point; rows that it does not send are zeros.

        Raises:
            UserError: If the message has not the declared form, or holds a value beyond the sum's bounds.
        """
        check(message, self.spec, "the client")
        summands = self.message_sums.summands(message, client, self.asked)
        return encode({name: _filled(summands[name], form) for name, form in self.sums.items()}, self.sums)

    def decode(self, words: Words, answered: Cohort) -> Message:
        """Computes the message that stands for all clients that answered.

        Raises:
            UserError: If the sum is none of messages of the declared form.
        """
        sums = decode(words, self.sums)
        message = self.message_sums.from_sums(sums, self.spec, answered, self.asked)
        check(message, self.spec, "all clients together")
        return message


@dataclass(frozen=True)
class Mask:
    """A client's means to mask one message.

    Attributes:
        party: The client's part, which has accepted the invitation.
        envelopes: What the others offered, as the server passed it on.
    """

    party: Party
    envelopes: bytes

    def pack(self, message: Message, exchange: Exchange, client: Client) -> bytes:
        """Turns a message into a masked one, serialised.

        Raises:
            UserError: If the message does not fit the sum, or an envelope is not what it should be.
        """
        invitation = self.party.invitation
        words = SumForm.of(exchange, client, invitation).encode(
            message, invitation.crowd([self.party.number])
        )
        self.party.mask(words, self.envelopes)
        return save({name: torch.from_numpy(part.view(f"<i{part.itemsize}")) for name, part in words.items()})


def _filled(summand: Tensor, form: SumSpec) -> Tensor:
    """Adds rows of zeros where a client sends fewer than the sum has."""
    missing = form.shape[0] - len(summand) if summand.ndim else 0
    return torch.cat([summand, summand.new_zeros(missing, *summand.shape[1:])]) if missing > 0 else summand
