"""The protocol of one secure sum: a client's part, and the server's.

A client masks what it adds, and reveals only what takes masks off the sum of enough. The server relays messages, adds
masked sums, and takes the masks off their sum.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from lit_fedad.core.client_names import NUMBERS, ClientNames
from lit_fedad.core.errors import UserError
from lit_fedad.privacy.fixed_point import Words
from lit_fedad.privacy.keys import (
    KEY_BYTES,
    SHARE_BYTES,
    KeyPair,
    add_mask,
    commitment,
    join,
    pair_sign,
    seal,
    split,
    unseal,
)
from lit_fedad.privacy.messages import (
    Invitation,
    Offer,
    Revealed,
    read_envelopes,
    read_survivors,
    write_envelopes,
    write_survivors,
)


@dataclass
class _Sum:
    """A client's secrets of one sum."""

    invitation: Invitation
    pair: KeyPair = field(default_factory=KeyPair)
    seed: bytes = field(default_factory=lambda: secrets.token_bytes(KEY_BYTES))
    publics: dict[int, bytes] = field(default_factory=dict)
    seed_shares: dict[int, bytes] = field(default_factory=dict)
    key_shares: dict[int, bytes] = field(default_factory=dict)


class Party:
    """A client in secure sums, one after the other. Nothing that it holds leaves the client, but what it returns.

    Args:
        number: The client.
        identity: Its registered keys.
        registry: The public keys of all clients, by number, from elsewhere than the server.
        names: What clients are called.
    """

    def __init__(
        self,
        number: int,
        identity: KeyPair,
        registry: Mapping[int, bytes],
        names: ClientNames = NUMBERS,
    ) -> None:
        self.number, self._identity, self._registry, self._names = number, identity, dict(registry), names
        self._offered: _Sum | None = None
        self._masked: _Sum | None = None

    def offer(self, blob: bytes) -> bytes:
        """Accepts an invitation: draws the secrets of this sum, and seals shares of them for every other member.

        Args:
            blob: An `Invitation`; not trusted.

        Returns:
            An `Offer`.

        Raises:
            UserError: If it invites others, or too few.
        """
        invitation = Invitation.from_bytes(blob)
        if unknown := sorted(set(invitation.members) - set(self._registry)):
            raise UserError(
                f"the server invites {self._names.title(unknown[0])}, whose key is not in the key registry"
            )
        if self.number not in invitation.members:
            raise UserError(f"the server invites others than {self._names.title(self.number)}")
        own = _Sum(invitation)
        places = invitation.shares_at()
        shares = [
            split(secret, invitation.quorum, list(places.values())) for secret in (own.seed, own.pair.private)
        ]
        envelopes = {}
        for member, place in places.items():
            parts = [part[place] for part in shares]
            if member == self.number:
                own.seed_shares[member], own.key_shares[member] = parts
            else:
                key = self._between(self.number, member, invitation)
                envelopes[member] = seal(key, b"".join([own.pair.public, *parts]))
        self._offered, self._masked = own, None
        return Offer(own.pair.public, commitment(own.seed), envelopes).to_bytes()

    @property
    def invitation(self) -> Invitation:
        """The invitation that was accepted last, whose sum is still to come.

        Raises:
            UserError: If there is none.
        """
        return self._accepted().invitation

    def _accepted(self) -> _Sum:
        if self._offered is None:
            raise UserError("the server asks for a masked sum, and has invited to none")
        return self._offered

    def mask(self, words: Words, blob: bytes) -> None:
        """Masks what the client adds, in place; once for every invitation.

        With s_uv the secret of two clients in this sum, and b_u the client's own (Bonawitz et al. 2017, section 4)::

            y_u = x_u + PRG(b_u) + sum_{u<v} PRG(s_uv) - sum_{u>v} PRG(s_uv)

        Args:
            words: What it adds, in fixed point.
            blob: The envelopes for this client, of all others that take part; not trusted.

        Raises:
            UserError: If they are too few, or an envelope is not of the client that it is said to be of.
        """
        own, self._offered = self._accepted(), None
        invitation = own.invitation
        envelopes = read_envelopes(blob)
        if self.number in envelopes or not set(envelopes) < set(invitation.members):
            raise UserError("the server passes on envelopes of clients that it has not invited")
        if len(envelopes) + 1 < invitation.quorum:
            raise UserError(f"only {len(envelopes) + 1} clients take part, of {invitation.quorum} that must")
        for other, message in envelopes.items():
            content = unseal(self._between(other, self.number, invitation), message, self._names.title(other))
            own.publics[other] = content[:KEY_BYTES]
            own.seed_shares[other] = content[KEY_BYTES : KEY_BYTES + SHARE_BYTES]
            own.key_shares[other] = content[KEY_BYTES + SHARE_BYTES :]
        for other, public in own.publics.items():
            add_mask(words, own.pair.agree(public, invitation.digest), pair_sign(self.number, other))
        add_mask(words, own.seed, 1)
        self._masked = own

    def reveal(self, blob: bytes) -> bytes:
        """Reveals this client's shares: once, of the seeds of survivors and of the keys of the others, never of both.

        Args:
            blob: The clients whose masked sums have arrived (`write_survivors`); not trusted.

        Returns:
            `Revealed`.

        Raises:
            UserError: If the client has masked nothing, or too few are named.
        """
        own, self._masked = self._masked, None
        if own is None:
            raise UserError(
                "the server asks for shares of a sum that this client has no part in, or a second time"
            )
        survivors, took_part = set(read_survivors(blob)), {self.number, *own.publics}
        if self.number not in survivors or not survivors <= took_part:
            raise UserError("the server names survivors that had no part in the sum")
        if len(survivors) < own.invitation.quorum:
            raise UserError(
                f"the server asks for the sum of {len(survivors)} clients, of {own.invitation.quorum} that must finish"
            )
        return Revealed(
            {member: own.seed_shares[member] for member in survivors},
            {member: own.key_shares[member] for member in took_part - survivors},
        ).to_bytes()

    def _between(self, sender: int, receiver: int, invitation: Invitation) -> bytes:
        """Computes the key of the envelope from one client to another, which both know."""
        other = receiver if sender == self.number else sender
        purpose = b"envelope/%d/%d/" % (sender, receiver) + invitation.digest
        return self._identity.agree(self._registry[other], purpose)


class Gathering:
    """One secure sum on the server, which holds masked sums, and secrets of clients that say nothing of what they add.

    Args:
        place: Run, round and exchange.
        members: Training images by client, of all that are asked.
        quorum: Fewest clients that must finish.
        names: What clients are called.

    Attributes:
        invitation: What every client is sent first.
        survivors: Clients whose masked sums have been added.

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
        """Takes the clients' offers.

        Args:
            blobs: `Offer` by client; not trusted.

        Returns:
            The envelopes for every client that takes part; and causes by client whose offer cannot be used.
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
        """Adds a client's masked sum to the others', and keeps nothing of it apart."""
        if not self.total:
            self.total = {name: np.zeros_like(part) for name, part in words.items()}
        for name, part in words.items():
            self.total[name] += part
        self.survivors.append(client)

    def name_survivors(self) -> bytes:
        """Returns what every survivor is asked with."""
        return write_survivors(self.survivors)

    def unmask(self, blobs: Mapping[int, bytes]) -> Words:
        """Takes all masks off the sum of the survivors.

        Args:
            blobs: `Revealed` by client; not trusted.

        Returns:
            The sum, in fixed point.

        Raises:
            UserError: If shares are too few, or do not give the secrets that clients have committed to.
        """
        revealed = {}
        for client, blob in sorted(blobs.items()):
            try:
                shares = Revealed.from_bytes(blob)
            except UserError:
                continue
            if set(shares.seeds) == set(self.survivors) and set(shares.keys) == self._gone():
                revealed[client] = shares
        quorum = self.invitation.quorum
        if len(revealed) < quorum:
            raise UserError(
                f"{len(revealed)} clients have revealed their shares, of {quorum} that must: the sum stays masked"
            )
        chosen = list(revealed)[:quorum]
        for client in self.survivors:
            seed = self._secret(client, {one: revealed[one].seeds[client] for one in chosen})
            if commitment(seed) != self.offers[client].commitment:
                raise self._false_shares(client)
            add_mask(self.total, seed, -1)
        for client in sorted(self._gone()):
            pair = KeyPair(self._secret(client, {one: revealed[one].keys[client] for one in chosen}))
            if pair.public != self.offers[client].public:
                raise self._false_shares(client)
            for other in self.survivors:
                key = pair.agree(self.offers[other].public, self.invitation.digest)
                add_mask(self.total, key, pair_sign(client, other))
        return self.total

    def _gone(self) -> set[int]:
        """Returns the clients that have offered, and dropped out since."""
        return set(self.offers) - set(self.survivors)

    def _secret(self, client: int, shares: Mapping[int, bytes]) -> bytes:
        places = self.invitation.shares_at()
        try:
            return join({places[one]: share for one, share in shares.items()})
        except ValueError as error:
            raise self._false_shares(client) from error

    def _false_shares(self, client: int) -> UserError:
        title = self.names.title(client)
        return UserError(f"the shares of {title}'s secrets are not those of what it has offered")
