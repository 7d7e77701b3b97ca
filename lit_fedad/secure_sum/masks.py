"""Masks: streams of random numbers that two clients know, and that cancel in the sum."""

from __future__ import annotations

from typing import Literal

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20

from lit_fedad.secure_sum.fixed_point import Words

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
