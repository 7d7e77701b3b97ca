"""The protocol of one secure sum: the side of a client, and the side of the server.

A client masks its summand, and later reveals only the shares that remove masks from a sum of enough clients. The server
relays messages, adds the masked summands, and removes the masks from their sum.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from lit_fedad.core.client_names import NUMBERS, ClientNames
from lit_fedad.core.errors import UserError
from lit_fedad.privacy.fixed_point import Words
from lit_fedad.privacy.keys import KEY_BYTES, KeyPair, seal, unseal
from lit_fedad.privacy.masking import add_mask, commitment, pair_sign
from lit_fedad.privacy.messages import (
    Invitation,
    Offer,
    Revealed,
    read_envelopes,
    read_survivors,
    write_envelopes,
    write_survivors,
)
from lit_fedad.privacy.shamir import SHARE_BYTES, join, split


@dataclass
class _SumSecrets:
    """The secrets of a client in one sum.

    Attributes:
        invitation: The accepted invitation.
        pair: The client's keys for the pairwise masks of this sum.
        seed: The seed of the client's own mask.
        publics: Public keys of the other clients that take part.
        seed_shares: This client's shares of the seeds of all clients, by client.
        key_shares: This client's shares of the private keys of all clients, by client.
    """

    invitation: Invitation
    pair: KeyPair = field(default_factory=KeyPair)
    seed: bytes = field(default_factory=lambda: secrets.token_bytes(KEY_BYTES))
    publics: dict[int, bytes] = field(default_factory=dict)
    seed_shares: dict[int, bytes] = field(default_factory=dict)
    key_shares: dict[int, bytes] = field(default_factory=dict)


class Party:
    """A client's side in secure sums, one sum after the other. Only the values that its methods return are sent.

    Args:
        number: Number of the client.
        identity: The client's registered keys.
        registry: The public keys of all clients, by number; they must not come from the server.
        names: Names of the clients in messages.
    """

    def __init__(
        self,
        number: int,
        identity: KeyPair,
        registry: Mapping[int, bytes],
        names: ClientNames = NUMBERS,
    ) -> None:
        self.number, self._identity, self._registry, self._names = number, identity, dict(registry), names
        self._offered: _SumSecrets | None = None
        self._masked: _SumSecrets | None = None

    def offer(self, blob: bytes) -> bytes:
        """Accepts an invitation: draws the secrets of this sum, and seals shares of them for every other member.

        Args:
            blob: A serialised `Invitation`; not trusted.

        Returns:
            A serialised `Offer`.

        Raises:
            UserError: If it invites unregistered clients, not this client, or too few clients.
        """
        invitation = Invitation.from_bytes(blob)
        if unknown := sorted(set(invitation.members) - set(self._registry)):
            raise UserError(
                f"the server invites {self._names.title(unknown[0])}, whose key is not in the key registry"
            )
        if self.number not in invitation.members:
            raise UserError(f"the server invites others than {self._names.title(self.number)}")
        mine = _SumSecrets(invitation)
        places = invitation.shares_at()
        shares = [
            split(secret, invitation.quorum, list(places.values()))
            for secret in (mine.seed, mine.pair.private)
        ]
        envelopes = {}
        for member, place in places.items():
            member_shares = [by_place[place] for by_place in shares]
            if member == self.number:
                mine.seed_shares[member], mine.key_shares[member] = member_shares
            else:
                key = self._envelope_key(self.number, member, invitation)
                envelopes[member] = seal(key, b"".join([mine.pair.public, *member_shares]))
        self._offered, self._masked = mine, None
        return Offer(mine.pair.public, commitment(mine.seed), envelopes).to_bytes()

    @property
    def invitation(self) -> Invitation:
        """The invitation that was accepted last, and for which nothing has been masked yet.

        Raises:
            UserError: If there is none.
        """
        return self._accepted().invitation

    def _accepted(self) -> _SumSecrets:
        """Returns the secrets of the sum whose invitation was accepted last; refuses if there is none."""
        if self._offered is None:
            raise UserError("the server asks for a masked sum, and has invited to none")
        return self._offered

    def mask(self, words: Words, blob: bytes) -> None:
        """Masks the client's summand, in place; only once for every invitation.

        With s_uv the secret of two clients in this sum, and b_u the client's own (Bonawitz et al. 2017, section 4)::

            y_u = x_u + PRG(b_u) + sum_{u<v} PRG(s_uv) - sum_{u>v} PRG(s_uv)

        Args:
            words: The summand, in fixed point.
            blob: The envelopes that all other clients that take part have addressed to this client; not trusted.

        Raises:
            UserError: If there are too few envelopes, or one does not come from the client that it claims as sender.
        """
        mine, self._offered = self._accepted(), None
        invitation = mine.invitation
        envelopes = read_envelopes(blob)
        if self.number in envelopes or not set(envelopes) < set(invitation.members):
            raise UserError("the server passes on envelopes of clients that it has not invited")
        if len(envelopes) + 1 < invitation.quorum:
            raise UserError(f"only {len(envelopes) + 1} clients take part, of {invitation.quorum} that must")
        for other, message in envelopes.items():
            content = unseal(
                self._envelope_key(other, self.number, invitation), message, self._names.title(other)
            )
            mine.publics[other] = content[:KEY_BYTES]
            mine.seed_shares[other] = content[KEY_BYTES : KEY_BYTES + SHARE_BYTES]
            mine.key_shares[other] = content[KEY_BYTES + SHARE_BYTES :]
        for other, public in mine.publics.items():
            add_mask(words, mine.pair.agree(public, invitation.digest), pair_sign(self.number, other))
        add_mask(words, mine.seed, 1)
        self._masked = mine

    def reveal(self, blob: bytes) -> bytes:
        """Reveals shares, only once: for each survivor a share of its seed, for each other client one of its key.

        Both for the same client would let the server remove all masks from that client's summand.

        Args:
            blob: The clients whose masked summands have arrived (`write_survivors`); not trusted.

        Returns:
            A serialised `Revealed`.

        Raises:
            UserError: If the client has masked nothing, or the server names too few survivors or others.
        """
        mine, self._masked = self._masked, None
        if mine is None:
            raise UserError(
                "the server asks for shares of a sum that this client has no part in, or a second time"
            )
        survivors, took_part = set(read_survivors(blob)), {self.number, *mine.publics}
        if self.number not in survivors or not survivors <= took_part:
            raise UserError("the server names survivors that had no part in the sum")
        if len(survivors) < mine.invitation.quorum:
            raise UserError(
                f"the server asks for the sum of {len(survivors)} clients, of {mine.invitation.quorum} that must finish"
            )
        return Revealed(
            {member: mine.seed_shares[member] for member in survivors},
            {member: mine.key_shares[member] for member in took_part - survivors},
        ).to_bytes()

    def _envelope_key(self, sender: int, receiver: int, invitation: Invitation) -> bytes:
        """Computes the key of the envelope from one client to another, which only these two know."""
        other = receiver if sender == self.number else sender
        purpose = b"envelope/%d/%d/" % (sender, receiver) + invitation.digest
        return self._identity.agree(self._registry[other], purpose)


class Gathering:
    """The server's side of one secure sum. It sees masked summands, and secrets that reveal only the sum.

    Args:
        place: Run, round and exchange.
        members: Number of training images of all invited clients, by client.
        quorum: Smallest number of clients that must finish.
        names: Names of the clients in messages.

    Attributes:
        invitation: The first message to every client.
        offers: Accepted offers by client.
        survivors: Clients whose masked summands have been added.
        total: Sum of the masked summands.

    Raises:
        UserError: If there are too few clients, or the quorum is no majority.
    """

    def __init__(
        self, place: str, members: Mapping[int, int], quorum: int, names: ClientNames = NUMBERS
    ) -> None:
        self.invitation = Invitation(f"{place}/{secrets.token_hex(8)}", dict(members), quorum)
        self.names = names
        self.offers: dict[int, Offer] = {}
        self.survivors: list[int] = []
        self.total: Words = {}

    def take_offers(self, blobs: Mapping[int, bytes]) -> tuple[dict[int, bytes], dict[int, str]]:
        """Checks and stores the clients' offers.

        Args:
            blobs: Serialised `Offer` by client; not trusted.

        Returns:
            The serialised envelopes for every client that takes part, and causes by client whose offer is refused.
        """
        refused = {}
        for client, blob in sorted(blobs.items()):
            try:
                offer = Offer.from_bytes(blob)
                if set(offer.envelopes) != set(self.invitation.members) - {client}:
                    raise UserError("its envelopes are not for all other clients")
                self.offers[client] = offer
            except UserError as error:
                refused[client] = str(error)
        return {
            client: write_envelopes(
                {other: offer.envelopes[client] for other, offer in self.offers.items() if other != client}
            )
            for client in self.offers
        }, refused

    def add(self, client: int, words: Words) -> None:
        """Adds a client's masked summand to the sum; the summand itself is not kept."""
        if not self.total:
            self.total = {name: np.zeros_like(part) for name, part in words.items()}
        for name, part in words.items():
            self.total[name] += part
        self.survivors.append(client)

    def name_survivors(self) -> bytes:
        """Returns the message that asks survivors for their shares."""
        return write_survivors(self.survivors)

    def unmask(self, blobs: Mapping[int, bytes]) -> Words:
        """Removes all masks from the sum of the survivors.

        Args:
            blobs: Serialised `Revealed` by client; not trusted.

        Returns:
            The sum, in fixed point.

        Raises:
            UserError: If there are too few shares, or they do not give the secrets that clients have committed to.
        """
        revealed = {}
        for client, blob in sorted(blobs.items()):
            try:
                shares = Revealed.from_bytes(blob)
            except UserError:
                continue
            if set(shares.seeds) == set(self.survivors) and set(shares.keys) == self._dropped_out():
                revealed[client] = shares
        quorum = self.invitation.quorum
        if len(revealed) < quorum:
            raise UserError(
                f"{len(revealed)} clients have revealed their shares, of {quorum} that must: the sum stays masked"
            )
        chosen = list(revealed)[:quorum]
        for client in self.survivors:
            seed = self._secret(client, {holder: revealed[holder].seeds[client] for holder in chosen})
            if commitment(seed) != self.offers[client].commitment:
                raise self._false_shares(client)
            add_mask(self.total, seed, -1)
        for client in sorted(self._dropped_out()):
            key_shares = {holder: revealed[holder].keys[client] for holder in chosen}
            pair = KeyPair(self._secret(client, key_shares))
            if pair.public != self.offers[client].public:
                raise self._false_shares(client)
            for other in self.survivors:
                key = pair.agree(self.offers[other].public, self.invitation.digest)
                add_mask(self.total, key, pair_sign(client, other))
        return self.total

    def _dropped_out(self) -> set[int]:
        """Returns the clients that have sent an offer, but no masked summand."""
        return set(self.offers) - set(self.survivors)

    def _secret(self, client: int, shares: Mapping[int, bytes]) -> bytes:
        """Computes a secret of a client from the shares that other clients hold, by holder."""
        places = self.invitation.shares_at()
        try:
            return join({places[holder]: share for holder, share in shares.items()})
        except ValueError as error:
            raise self._false_shares(client) from error

    def _false_shares(self, client: int) -> UserError:
        title = self.names.title(client)
        return UserError(f"the shares of {title}'s secrets are not those of what it has offered")
