"""Shamir's secret sharing (Communications of the ACM, 1979) of 32 bytes."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence

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
