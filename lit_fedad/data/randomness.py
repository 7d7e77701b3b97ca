"""Random numbers for data: one generator a purpose, never global state."""

from hashlib import sha256

import numpy as np


def seeded(*key: object) -> np.random.Generator:
    """Returns the generator that belongs to a key.

    The key is hashed as text: the same key gives the same numbers in every process and on every machine, and
    keys that differ anywhere give unrelated numbers.

    Args:
        *key: What the numbers are for, for example ``(seed, "partition")``.

    Example:
        >>> bool(seeded(0, "partition").random() == seeded(0, "partition").random())
        True
        >>> bool(seeded(0, "partition").random() == seeded(1, "partition").random())
        False
    """
    return np.random.default_rng(int.from_bytes(sha256(repr(key).encode()).digest()))
