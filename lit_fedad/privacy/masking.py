"""Masks of secure sums: streams of random numbers that two clients know, and that cancel in the sum."""

from __future__ import annotations

import hashlib
from typing import Literal

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20

from lit_fedad.privacy.fixed_point import Words

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


def commitment(seed: bytes) -> bytes:
    """Returns a hash that commits to 32 random bytes without revealing them."""
    return hashlib.sha256(b"lit_fedad secure sum/own mask/" + seed).digest()
