"""The server's part in one secure sum: it relays messages, adds masked sums, and takes the masks off their sum."""

from __future__ import annotations

import secrets
from collections.abc import Mapping

import numpy as np

from lit_fedad.core.client_names import NUMBERS, ClientNames
from lit_fedad.core.errors import UserError
from lit_fedad.privacy.fixed_point import Words
from lit_fedad.privacy.keys import KeyPair, commitment
from lit_fedad.privacy.messages import Invitation, Offer, Revealed, write_envelopes, write_survivors
from lit_fedad.privacy.secret_sharing import add_mask, join, pair_sign


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
