"""A site's key for secure sums, and the registry of those of all sites, which their operators give each other."""

from __future__ import annotations

import base64
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lit_fedad.core.errors import UserError
from lit_fedad.core.files import given_bytes, write_secret
from lit_fedad.privacy.keys import KEY_BYTES, KeyPair
from lit_fedad.sites.refusals import Code, RefusalError

KEY = "sum.key"
PUBLIC = "sum.pub"
REGISTRY = "key_registry"


def write_sum_key(folder: Path, name: str) -> None:
    """Makes a site's key pair for secure sums: ``sum.key``, which only its owner can read, and ``sum.pub``.

    Args:
        folder: The site's folder.
        name: Name of the site, which stands beside the public key.
    """
    pair = KeyPair()
    write_secret(folder / KEY, f"{_text(pair.private)}\n".encode())
    (folder / PUBLIC).write_text(f"{name} {_text(pair.public)}\n")


@dataclass(frozen=True)
class KeyRegistry:
    """The public keys of all sites, and the private one of this site.

    Attributes:
        name: Name of this site.
        pair: Its keys.
        keys: Public keys by name of a site.
    """

    name: str
    pair: KeyPair
    keys: Mapping[str, bytes]

    @classmethod
    def read(cls, folder: Path, name: str) -> KeyRegistry | None:
        """Reads ``key_registry`` in a site's folder: the lines of all sites' ``sum.pub``, one after the other.

        Returns:
            The registry; None if there is none.

        Raises:
            UserError: If a line is not a name and a key, or this site's key is not among them.
        """
        path = folder / REGISTRY
        if not os.path.lexists(path):  # a link to nowhere is no site that answers without masks
            return None
        keys: dict[str, bytes] = {}
        for number, line in enumerate(_read(path).splitlines(), start=1):
            words = line.split()
            if not words:
                continue
            if len(words) != 2 or words[0] in keys:
                raise UserError(
                    f"{path}, line {number}: give the name of a site and its key, once (its {PUBLIC})"
                )
            keys[words[0]] = _key(words[1], f"{path}, line {number}")
        if len(set(keys.values())) < len(keys):
            raise UserError(f"{path}: two sites have the same key")
        pair = KeyPair(_key(_read(folder / KEY).strip(), str(folder / KEY)))
        if keys.get(name) != pair.public:
            raise UserError(
                f"{path}: site {name} is not in it with its own key; add the line of its {PUBLIC}"
            )
        return cls(name, pair, keys)

    def numbered(self, names: Sequence[str], client: int) -> dict[int, bytes]:
        """Returns public keys by client number.

        Args:
            names: Names of a run's sites by client number, as the coordinator says; not trusted.
            client: The number of this site.

        Raises:
            RefusalError: If a site is not in the key registry or occurs twice, or this one has another number.
        """
        if unknown := [name for name in names if name not in self.keys]:
            raise RefusalError(Code.NAMES, detail=f"site {unknown[0]} is not in this site's key registry")
        if len(set(names)) < len(names) or not 0 <= client < len(names) or names[client] != self.name:
            raise RefusalError(Code.NAMES)
        return {number: self.keys[name] for number, name in enumerate(names)}


def _read(path: Path) -> str:
    try:
        return given_bytes(path).decode()
    except (OSError, ValueError) as error:
        raise UserError(
            f"{path}: cannot be read ({type(error).__name__}); make it: lit-fedad site init"
        ) from error


def _key(text: str, where: str) -> bytes:
    try:
        key = base64.b64decode(text, validate=True)
    except ValueError:
        key = b""
    if len(key) != KEY_BYTES:
        raise UserError(f"{where}: is no key of {KEY_BYTES} bytes in base64")
    return key


def _text(key: bytes) -> str:
    return base64.b64encode(key).decode()
