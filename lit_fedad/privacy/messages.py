"""What a server and the clients of a secure sum send each other, checked on receipt: nobody is trusted.

The server invites; a client offers its keys' shares, sealed for each other client, which the server passes on; masked
sums follow; the server names the survivors, and each reveals its shares.
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
from lit_fedad.privacy.keys import KEY_BYTES, SHARE_BYTES

ENVELOPE_BYTES = KEY_BYTES + 2 * SHARE_BYTES + 16
"""A public key, two shares, and the seal."""

MOST_MEMBERS = 10_000
FEWEST_MEMBERS = 3
"""Of two clients, each could take its own from the sum."""

_LONGEST = 1 << 24


@dataclass(frozen=True)
class Invitation:
    """The invitation to a secure sum.

    Attributes:
        place: Run, round and exchange, and random characters: no two sums have the same.
        members: Training images by client, of all that are asked.
        quorum: Fewest clients that must finish; more than half, so that no two disjoint sets of clients can.
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
        """A hash of all that members must agree on; keys are derived for it alone."""
        return hashlib.sha256(self.to_bytes()).digest()

    def crowd(self, members: Any) -> Cohort:
        """Returns the size of a set of members."""
        return Cohort(len(members), sum(self.members[member] for member in members))

    def shares_at(self) -> dict[int, int]:
        """Returns the place of each member's share, from 1."""
        return {member: place for place, member in enumerate(sorted(self.members), start=1)}

    def to_bytes(self) -> bytes:
        """Writes the invitation; equal ones alike."""
        return _write(place=self.place, members=sorted(self.members.items()), quorum=self.quorum)

    @classmethod
    def from_bytes(cls, blob: bytes) -> Invitation:
        """Reads an invitation.

        Raises:
            UserError: If it is none.
        """
        what = "an invitation to a secure sum"
        return cls(**_read(blob, what, place=_text, members=_sizes, quorum=_whole))


@dataclass(frozen=True)
class Offer:
    """What a client offers the others.

    Attributes:
        public: The public key of its masks in this sum.
        commitment: `lit_fedad.privacy.keys.commitment` to the seed of the mask of its own.
        envelopes: Sealed messages by client, with the same key and that client's shares.
    """

    public: bytes
    commitment: bytes
    envelopes: Mapping[int, bytes]

    def to_bytes(self) -> bytes:
        """Writes the offer."""
        return _write(
            public=self.public.hex(), commitment=self.commitment.hex(), envelopes=_hexed(self.envelopes)
        )

    @classmethod
    def from_bytes(cls, blob: bytes) -> Offer:
        """Reads an offer.

        Raises:
            UserError: If it is none.
        """
        key, what = partial(_bytes, KEY_BYTES), "an offer to a secure sum"
        return cls(**_read(blob, what, public=key, commitment=key, envelopes=_ENVELOPES))


def write_envelopes(envelopes: Mapping[int, bytes]) -> bytes:
    """Writes the envelopes that are for one client, by sender."""
    return _write(envelopes=_hexed(envelopes))


def read_envelopes(blob: bytes) -> dict[int, bytes]:
    """Reads `write_envelopes`.

    Raises:
        UserError: If it is none.
    """
    return _read(blob, "envelopes of a secure sum", envelopes=_ENVELOPES)["envelopes"]  # type: ignore[no-any-return]


def write_survivors(survivors: list[int]) -> bytes:
    """Writes the list of clients whose masked sums have arrived."""
    return _write(survivors=sorted(survivors))


def read_survivors(blob: bytes) -> list[int]:
    """Reads `write_survivors`.

    Raises:
        UserError: If it is none.
    """
    return _read(blob, "survivors of a secure sum", survivors=_members)["survivors"]  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Revealed:
    """The shares that a survivor reveals.

    Attributes:
        seeds: Of the seeds of survivors' own masks, by survivor.
        keys: Of the private keys of the others, by client.
    """

    seeds: Mapping[int, bytes]
    keys: Mapping[int, bytes]

    def to_bytes(self) -> bytes:
        """Writes the shares."""
        return _write(seeds=_hexed(self.seeds), keys=_hexed(self.keys))

    @classmethod
    def from_bytes(cls, blob: bytes) -> Revealed:
        """Reads shares.

        Raises:
            UserError: If they are none.
        """
        form = partial(_by_client, SHARE_BYTES)
        return cls(**_read(blob, "shares of a secure sum", seeds=form, keys=form))


def _write(**content: Any) -> bytes:
    return json.dumps(content, separators=(",", ":")).encode()


def _read(blob: bytes, what: str, **forms: Callable[[Any], Any]) -> dict[str, Any]:
    """Reads an object that has these keys and no others, each value by its form.

    Raises:
        UserError: If the bytes hold anything else.
    """
    try:
        content = json.loads(blob) if len(blob) <= _LONGEST else None
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
    if not isinstance(entries, dict) or len(entries) > MOST_MEMBERS:
        raise TypeError
    if not all(client.isascii() and client.isdigit() and len(client) < 10 for client in entries):
        raise ValueError("no client")
    return {int(client): _bytes(size, entry) for client, entry in entries.items()}


def _members(entries: Any) -> list[int]:
    if not isinstance(entries, list) or len(entries) > MOST_MEMBERS:
        raise TypeError
    if len(set(entries)) < len(entries):
        raise ValueError("twice")
    return [_whole(member) for member in entries]


def _sizes(entries: Any) -> dict[int, int]:
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
