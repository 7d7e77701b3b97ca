"""Shamir's secret sharing: a secret is divided into shares, of which a threshold gives it back."""

from __future__ import annotations

import functools
import secrets
from collections.abc import Mapping, Sequence

from lit_fedad.privacy.keys import KEY_BYTES

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
