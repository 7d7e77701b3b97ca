"""The messages between the server and the clients of a secure sum; they are checked on receipt, as nobody is trusted.

The server sends an invitation. Each client answers with an offer: shares of its secrets, sealed for each other client,
which the server passes on in envelopes. Then clients send their masked summands. Finally the server lists the survivors
(the clients whose summands have arrived), and each survivor reveals shares.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from lit_fedad.contracts.sums import Cohort
from lit_fedad.core.errors import UserError
from lit_fedad.privacy.keys import KEY_BYTES
from lit_fedad.privacy.shamir import SHARE_BYTES

ENVELOPE_BYTES = KEY_BYTES + 2 * SHARE_BYTES + 16
"""Size of an envelope in bytes: a public key, two shares, and the seal."""

MOST_MEMBERS = 10_000
FEWEST_MEMBERS = 3
"""Smallest number of clients: with two, each could subtract its own summand and get the other's."""

_MAX_BYTES = 1 << 24  # of a message


@dataclass(frozen=True)
class Invitation:
    """The invitation to a secure sum.

    Attributes:
        place: Identifier of the sum: run, round and exchange, and random characters, so that it is unique.
        members: Number of training images of all invited clients, by client.
        quorum: Smallest number of clients that must finish; more than half, so that two disjoint sets of clients
            cannot both finish.
    """

    place: str
    members: dict[int, int]
    quorum: int

    def __post_init__(self) -> None:
        if not FEWEST_MEMBERS <= len(self.members) <= MOST_MEMBERS:
            raise UserError(
                f"a secure sum of {len(self.members)} clients: it takes at least {FEWEST_MEMBERS}, since each of"
                " two knows the other's from the sum"
            )
        if not len(self.members) < 2 * self.quorum <= 2 * len(self.members):
            raise UserError(
                f"a secure sum of {len(self.members)} clients of which {self.quorum} must finish: give more than half"
            )

    @property
    def digest(self) -> bytes:
        """A hash of everything that members must agree on; the keys of this sum are derived from it."""
        return hashlib.sha256(self.to_bytes()).digest()

    def crowd(self, members: Any) -> Cohort:
        """Returns the number of some members, and of their images."""
        return Cohort(len(members), sum(self.members[member] for member in members))

    def shares_at(self) -> dict[int, int]:
        """Returns, by member, the place (from 1) at which the polynomial of a secret is evaluated for its share."""
        return {member: place for place, member in enumerate(sorted(self.members), start=1)}

    def to_bytes(self) -> bytes:
        """Serialises the invitation; equal invitations give equal bytes."""
        return _write(place=self.place, members=sorted(self.members.items()), quorum=self.quorum)

    @classmethod
    def from_bytes(cls, blob: bytes) -> Invitation:
        """Reads an invitation.

        Raises:
            UserError: If the bytes hold no valid invitation.
        """
        what = "an invitation to a secure sum"
        return cls(**_read(blob, what, place=_text, members=_sizes, quorum=_whole))


@dataclass(frozen=True)
class Offer:
    """The answer of a client to an invitation.

    Attributes:
        public: The client's public key for the pairwise masks of this sum.
        commitment: `lit_fedad.privacy.masking.commitment` to the seed of the client's own mask.
        envelopes: Sealed messages to the other clients, by receiver: the same public key, and the receiver's shares.
    """

    public: bytes
    commitment: bytes
    envelopes: Mapping[int, bytes]

    def to_bytes(self) -> bytes:
        """Serialises the offer."""
        return _write(
            public=self.public.hex(), commitment=self.commitment.hex(), envelopes=_hexed(self.envelopes)
        )

    @classmethod
    def from_bytes(cls, blob: bytes) -> Offer:
        """Reads an offer.

        Raises:
            UserError: If the bytes hold no valid offer.
        """
        key, what = partial(_bytes, KEY_BYTES), "an offer to a secure sum"
        return cls(**_read(blob, what, public=key, commitment=key, envelopes=_ENVELOPES))


def write_envelopes(envelopes: Mapping[int, bytes]) -> bytes:
    """Serialises the envelopes addressed to one client, by sender."""
    return _write(envelopes=_hexed(envelopes))


def read_envelopes(blob: bytes) -> dict[int, bytes]:
    """Reads the bytes of `write_envelopes`.

    Raises:
        UserError: If they hold no valid envelopes.
    """
    return _read(blob, "envelopes of a secure sum", envelopes=_ENVELOPES)["envelopes"]  # type: ignore[no-any-return]


def write_survivors(survivors: list[int]) -> bytes:
    """Serialises the list of clients whose masked summands have arrived."""
    return _write(survivors=sorted(survivors))


def read_survivors(blob: bytes) -> list[int]:
    """Reads the bytes of `write_survivors`.

    Raises:
        UserError: If they hold no valid list.
    """
    return _read(blob, "survivors of a secure sum", survivors=_members)["survivors"]  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Revealed:
    """The shares that a survivor reveals.

    Attributes:
        seeds: Shares of the seeds of the survivors' own masks, by survivor.
        keys: Shares of the private keys of clients that have dropped out, by client.
    """

    seeds: Mapping[int, bytes]
    keys: Mapping[int, bytes]

    def to_bytes(self) -> bytes:
        """Serialises the shares."""
        return _write(seeds=_hexed(self.seeds), keys=_hexed(self.keys))

    @classmethod
    def from_bytes(cls, blob: bytes) -> Revealed:
        """Reads shares.

        Raises:
            UserError: If the bytes hold no valid shares.
        """
        form = partial(_by_client, SHARE_BYTES)
        return cls(**_read(blob, "shares of a secure sum", seeds=form, keys=form))


def _write(**content: Any) -> bytes:
    return json.dumps(content, separators=(",", ":")).encode()


def _read(blob: bytes, what: str, **forms: Callable[[Any], Any]) -> dict[str, Any]:
    """Reads a JSON object that has exactly the keys of `forms`; each form parses and checks the value of its key.

    Raises:
        UserError: If the bytes hold anything else.
    """
    try:
        content = json.loads(blob) if len(blob) <= _MAX_BYTES else None
        if not isinstance(content, dict) or set(content) != set(forms):
            raise ValueError("other keys")
        return {name: form(content[name]) for name, form in forms.items()}
    except (ValueError, TypeError, RecursionError) as error:
        raise UserError(f"bytes arrived that should be {what}, and cannot be read") from error


def _hexed(entries: Mapping[int, bytes]) -> dict[str, str]:
    return {str(client): entry.hex() for client, entry in sorted(entries.items())}


def _bytes(size: int, text: Any) -> bytes:
    entry = bytes.fromhex(text)
    if len(entry) != size:
        raise ValueError("other size")
    return entry


def _by_client(size: int, entries: Any) -> dict[int, bytes]:
    """Reads hexadecimal entries of a size in bytes, by client."""
    if not isinstance(entries, dict) or len(entries) > MOST_MEMBERS:
        raise TypeError
    if not all(client.isascii() and client.isdigit() and len(client) < 10 for client in entries):
        raise ValueError("no client")
    return {int(client): _bytes(size, entry) for client, entry in entries.items()}


def _members(entries: Any) -> list[int]:
    """Reads a list of different client numbers."""
    if not isinstance(entries, list) or len(entries) > MOST_MEMBERS:
        raise TypeError
    if len(set(entries)) < len(entries):
        raise ValueError("twice")
    return [_whole(member) for member in entries]


def _sizes(entries: Any) -> dict[int, int]:
    """Reads pairs of a client number and its number of images."""
    pairs = [(_whole(member), _whole(images)) for member, images in entries]
    if len(dict(pairs)) < len(pairs):
        raise ValueError("twice")
    return dict(pairs)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError
    return value


def _whole(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 40:
        raise TypeError
    return value


_ENVELOPES = partial(_by_client, ENVELOPE_BYTES)
