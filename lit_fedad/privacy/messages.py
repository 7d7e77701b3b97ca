"""What a server and the clients of a secure sum send each other, checked on receipt: nobody is trusted.

The server invites; a client offers its keys' shares, sealed for each other client, which the server passes on; masked
sums follow; the server names the survivors, and each reveals its shares.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lit_fedad.contracts.sums import Cohort
from lit_fedad.core.errors import UserError
from lit_fedad.privacy.keys import KEY_BYTES
from lit_fedad.privacy.secret_sharing import SHARE_BYTES

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
    def asked(self) -> Cohort:
        """All members."""
        return self.crowd(self.members)

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
        members = [[member, images] for member, images in sorted(self.members.items())]
        return _write({"place": self.place, "members": members, "quorum": self.quorum})

    @classmethod
    def from_bytes(cls, blob: bytes) -> Invitation:
        """Reads an invitation.

        Raises:
            UserError: If it is none.
        """
        content = _read(blob, {"place", "members", "quorum"}, "an invitation to a secure sum")
        try:
            pairs = [(_whole(member), _whole(images)) for member, images in content["members"]]
            place, quorum = content["place"], _whole(content["quorum"])
            if not isinstance(place, str) or len(dict(pairs)) < len(pairs):
                raise TypeError
        except (TypeError, ValueError) as error:
            raise UserError("the server sent an invitation to a secure sum that cannot be read") from error
        return cls(place, dict(pairs), quorum)


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
        own = {"public": self.public.hex(), "commitment": self.commitment.hex()}
        return _write({**own, "envelopes": _hexed(self.envelopes)})

    @classmethod
    def from_bytes(cls, blob: bytes) -> Offer:
        """Reads an offer.

        Raises:
            UserError: If it is none.
        """
        what = "an offer to a secure sum"
        content = _read(blob, {"public", "commitment", "envelopes"}, what)
        public, hashed = (_bytes_of(content[name], KEY_BYTES, what) for name in ("public", "commitment"))
        return cls(public, hashed, _bytes_by_client(content["envelopes"], ENVELOPE_BYTES, what))


def write_envelopes(envelopes: Mapping[int, bytes]) -> bytes:
    """Writes the envelopes that are for one client, by sender."""
    return _write({"envelopes": _hexed(envelopes)})


def read_envelopes(blob: bytes) -> dict[int, bytes]:
    """Reads `write_envelopes`.

    Raises:
        UserError: If it is none.
    """
    what = "envelopes of a secure sum"
    return _bytes_by_client(_read(blob, {"envelopes"}, what)["envelopes"], ENVELOPE_BYTES, what)


def write_survivors(survivors: list[int]) -> bytes:
    """Writes the list of clients whose masked sums have arrived."""
    return _write({"survivors": sorted(survivors)})


def read_survivors(blob: bytes) -> list[int]:
    """Reads `write_survivors`.

    Raises:
        UserError: If it is none.
    """
    what = "survivors of a secure sum"
    listed = _read(blob, {"survivors"}, what)["survivors"]
    if not isinstance(listed, list) or len(listed) > MOST_MEMBERS:
        raise _unreadable(what)
    try:
        return [_whole(member) for member in listed]
    except TypeError as error:
        raise _unreadable(what) from error


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
        return _write({"seeds": _hexed(self.seeds), "keys": _hexed(self.keys)})

    @classmethod
    def from_bytes(cls, blob: bytes) -> Revealed:
        """Reads shares.

        Raises:
            UserError: If they are none.
        """
        what = "shares of a secure sum"
        content = _read(blob, {"seeds", "keys"}, what)
        return cls(*(_bytes_by_client(content[name], SHARE_BYTES, what) for name in ("seeds", "keys")))


def _write(content: dict[str, Any]) -> bytes:
    return json.dumps(content, separators=(",", ":")).encode()


def _read(blob: bytes, keys: set[str], what: str) -> dict[str, Any]:
    try:
        if len(blob) > _LONGEST:
            raise ValueError
        content = json.loads(blob)
    except (ValueError, RecursionError) as error:
        raise _unreadable(what) from error
    if not isinstance(content, dict) or set(content) != keys:
        raise _unreadable(what)
    return content


def _hexed(entries: Mapping[int, bytes]) -> dict[str, str]:
    return {str(client): entry.hex() for client, entry in sorted(entries.items())}


def _bytes_of(text: Any, size: int, what: str) -> bytes:
    try:
        entry = bytes.fromhex(text)
    except (TypeError, ValueError) as error:
        raise _unreadable(what) from error
    if len(entry) != size:
        raise _unreadable(what)
    return entry


def _bytes_by_client(entries: Any, size: int, what: str) -> dict[int, bytes]:
    if not isinstance(entries, dict) or len(entries) > MOST_MEMBERS:
        raise _unreadable(what)
    if not all(client.isascii() and client.isdigit() and len(client) < 10 for client in entries):
        raise _unreadable(what)
    return {int(client): _bytes_of(entry, size, what) for client, entry in entries.items()}


def _whole(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 40:
        raise TypeError
    return value


def _unreadable(what: str) -> UserError:
    return UserError(f"bytes arrived that should be {what}, and cannot be read")
