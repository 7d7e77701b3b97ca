"""Secrets of clients in secure sums: keys, shares of secrets, and masks.

Keys are agreed on by X25519 (RFC 7748) and derived by HKDF (RFC 5869); messages are sealed by ChaCha20-Poly1305
(RFC 8439). Masks are streams of random numbers that two clients know, and that cancel in the sum.
"""

from __future__ import annotations

import functools
import hashlib
import secrets
from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from lit_fedad.core.errors import UserError
from lit_fedad.privacy.fixed_point import Words

KEY_BYTES = 32

_NONCE = bytes(12)  # may be constant, because a key seals only one message


class KeyPair:
    """A pair of X25519 keys.

    Args:
        private: The private key, 32 bytes; None for a new one.
    """

    def __init__(self, private: bytes | None = None) -> None:
        self._key = (
            X25519PrivateKey.generate() if private is None else X25519PrivateKey.from_private_bytes(private)
        )

    @property
    def private(self) -> bytes:
        """The private key, 32 bytes."""
        return self._key.private_bytes_raw()

    @property
    def public(self) -> bytes:
        """The public key, 32 bytes."""
        return self._key.public_key().public_bytes_raw()

    def agree(self, public: bytes, purpose: bytes) -> bytes:
        """Computes the 32 bytes that only the holders of both private keys know.

        Args:
            public: The other party's public key.
            purpose: What the bytes are for; other purposes give unrelated bytes.

        Raises:
            UserError: If `public` is no X25519 key.
        """
        try:
            secret = self._key.exchange(X25519PublicKey.from_public_bytes(public))
        except ValueError as error:
            raise UserError("a public key of the secure sum is no X25519 key") from error
        return HKDF(SHA256(), KEY_BYTES, salt=None, info=b"lit_fedad secure sum/" + purpose).derive(secret)


def seal(key: bytes, content: bytes) -> bytes:
    """Encrypts and authenticates a message; a key must never seal a second one."""
    return ChaCha20Poly1305(key).encrypt(_NONCE, content, None)


def unseal(key: bytes, message: bytes, sender: str) -> bytes:
    """Opens a sealed message.

    Raises:
        UserError: If the message was not sealed with this key.
    """
    try:
        return ChaCha20Poly1305(key).decrypt(_NONCE, message, None)
    except InvalidTag as error:
        raise UserError(
            f"the message of {sender} was not sealed with the key that it is registered with: compare the keys"
        ) from error


def commitment(seed: bytes) -> bytes:
    """Returns a hash that commits to 32 random bytes without revealing them."""
    return hashlib.sha256(b"lit_fedad secure sum/own mask/" + seed).digest()


PRIME = 2**256 + 297
"""The smallest prime above all secrets of 32 bytes."""

SHARE_BYTES = 33


def split(secret: bytes, threshold: int, places: Sequence[int]) -> dict[int, bytes]:
    """Divides a secret into shares: any `threshold` of them give the secret, and fewer say nothing about it.

    The shares are values of a random polynomial of degree threshold - 1 whose value at 0 is the secret.

    Args:
        secret: The secret, 32 bytes.
        threshold: Number of shares that give the secret, at least 1.
        places: Different positive numbers at which the polynomial is evaluated.

    Returns:
        Shares of 33 bytes, by place.

    Raises:
        ValueError: If the secret has another length, or a place is not positive or occurs twice.

    Example:
        >>> shares = split(b"a secret of thirty-two bytes ...", 2, [1, 2, 3])
        >>> join({1: shares[1], 3: shares[3]})
        b'a secret of thirty-two bytes ...'
    """
    if len(secret) != KEY_BYTES or min(places) < 1 or len(set(places)) < len(places):
        raise ValueError("a secret has 32 bytes, and shares have different places from 1")
    drawn = [secrets.randbelow(PRIME) for _ in range(threshold - 1)]
    coefficients = [int.from_bytes(secret, "big"), *drawn]
    return {place: _value(coefficients, place).to_bytes(SHARE_BYTES, "big") for place in places}


def join(shares: Mapping[int, bytes]) -> bytes:
    """Computes a secret from exactly `threshold` of its shares, by Lagrange interpolation at 0.

    Args:
        shares: Shares by place.

    Returns:
        The secret; meaningless bytes if the shares belong to different secrets or are too few.

    Raises:
        ValueError: If the shares do not give a secret of 32 bytes.
    """
    weights = _weights(tuple(shares))
    value = sum(int.from_bytes(share, "big") * weights[place] for place, share in shares.items()) % PRIME
    if value >= 1 << (8 * KEY_BYTES):
        raise ValueError("shares of no secret of 32 bytes")
    return value.to_bytes(KEY_BYTES, "big")


@functools.lru_cache(maxsize=1)  # the secrets of one sum have shares at the same places
def _weights(places: tuple[int, ...]) -> dict[int, int]:
    """Returns the weight of the share at each place in Lagrange interpolation at 0."""
    weights = {}
    for place in places:
        numerator = denominator = 1
        for other in places:
            if other != place:
                numerator = numerator * other % PRIME
                denominator = denominator * (other - place) % PRIME
        weights[place] = numerator * pow(denominator, -1, PRIME) % PRIME
    return weights


def _value(coefficients: Sequence[int], place: int) -> int:
    """Evaluates a polynomial modulo `PRIME` (Horner's method)."""
    value = 0
    for coefficient in reversed(coefficients):
        value = (value * place + coefficient) % PRIME
    return value


_CHUNK_BYTES = 1 << 22
"""Number of bytes of a mask that are in memory at once."""


def add_mask(words: Words, key: bytes, sign: Literal[1, -1]) -> None:
    """Adds the mask of a key to fixed-point numbers, or subtracts it, in place.

    The mask is a stream of ChaCha20 (RFC 8439); a key must be used for a single mask.

    Args:
        words: The numbers by name; tensors with equal names and sizes get equal masks.
        key: The key, 32 bytes.
        sign: 1 adds the mask, -1 subtracts it.
    """
    stream = Cipher(ChaCha20(key, bytes(16)), mode=None).encryptor()
    add = np.add if sign == 1 else np.subtract
    for name in sorted(words):
        flat = words[name].reshape(-1)
        size = _CHUNK_BYTES // flat.itemsize
        for start in range(0, len(flat), size):
            part = flat[start : start + size]
            mask = np.frombuffer(stream.update(bytes(part.nbytes)), dtype=part.dtype)
            add(part, mask, out=part)


def pair_sign(own: int, other: int) -> Literal[1, -1]:
    """Returns the sign with which a client adds the mask that it shares with another; the other's sign is opposite."""
    return 1 if own < other else -1
