"""Masks: streams of random numbers that two clients know, and that cancel in the sum."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20

from lit_fedad.privacy.fixed_point import Words

PRIME = 2**256 + 297
"""The smallest prime above all secrets."""

SECRET_BYTES = 32
SHARE_BYTES = 33


def split(secret: bytes, threshold: int, places: Sequence[int]) -> dict[int, bytes]:
    """Divides a secret into shares, any `threshold` of which give it back, and fewer of which say nothing about it.

    The shares are values of a random polynomial of degree threshold - 1 whose value at 0 is the secret.

    Args:
        secret: 32 bytes.
        threshold: Number of shares that give it back, at least 1.
        places: Different places at which the polynomial is evaluated, from 1.

    Returns:
        Shares of 33 bytes, by place.

    Raises:
        ValueError: If the secret has another length, or a place is not positive or occurs twice.

    Example:
        >>> shares = split(b"a secret of thirty-two bytes ...", 2, [1, 2, 3])
        >>> join({1: shares[1], 3: shares[3]})
        b'a secret of thirty-two bytes ...'
    """
    if len(secret) != SECRET_BYTES or min(places) < 1 or len(set(places)) < len(places):
        raise ValueError("a secret has 32 bytes, and shares have different places from 1")
    coefficients = [
        int.from_bytes(secret, "big"),
        *(secrets.randbelow(PRIME) for _ in range(threshold - 1)),
    ]
    return {place: _value(coefficients, place).to_bytes(SHARE_BYTES, "big") for place in places}


def join(shares: Mapping[int, bytes]) -> bytes:
    """Computes a secret from exactly as many of its shares as it takes, by Lagrange's interpolation at 0.

    Args:
        shares: Shares by place.

    Returns:
        The secret; from shares of different secrets, or too few, bytes that mean nothing.

    Raises:
        ValueError: If the shares are of no secret of 32 bytes.
    """
    total = 0
    for place, share in shares.items():
        numerator = denominator = 1
        for other in shares:
            if other != place:
                numerator = numerator * other % PRIME
                denominator = denominator * (other - place) % PRIME
        total += int.from_bytes(share, "big") * numerator * pow(denominator, -1, PRIME)
    value = total % PRIME
    if value >= 1 << (8 * SECRET_BYTES):
        raise ValueError("shares of no secret of 32 bytes")
    return value.to_bytes(SECRET_BYTES, "big")


def _value(coefficients: Sequence[int], place: int) -> int:
    value = 0
    for coefficient in reversed(coefficients):
        value = (value * place + coefficient) % PRIME
    return value


_STRETCH = 1 << 22
"""Bytes of a stream that are in memory at once."""


def add_mask(words: Words, key: bytes, sign: Literal[1, -1]) -> None:
    """Adds the stream of a key to numbers in fixed point, or takes it away, in place.

    The stream is ChaCha20's (RFC 8439); a key makes only one.

    Args:
        words: The numbers, by name; those of equal names and sizes get equal masks.
        key: 32 bytes.
        sign: 1 adds, -1 takes away.
    """
    stream = Cipher(ChaCha20(key, bytes(16)), mode=None).encryptor()
    add = np.add if sign == 1 else np.subtract
    for name in sorted(words):
        flat = words[name].reshape(-1)
        size = _STRETCH // flat.itemsize
        for start in range(0, len(flat), size):
            part = flat[start : start + size]
            mask = np.frombuffer(stream.update(bytes(part.nbytes)), dtype=part.dtype)
            add(part, mask, out=part)


def pair_sign(own: int, other: int) -> Literal[1, -1]:
    """Returns the sign of the mask that a client shares with another: the two have opposite ones."""
    return 1 if own < other else -1
