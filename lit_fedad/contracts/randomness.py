"""Random numbers that depend on the position in the experiment, not on the numbers that were drawn before."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import numpy as np
import torch


def derive_seed(seed: int, purpose: str, round: int = 0, client: int | None = None) -> int:
    """Derives a 63-bit seed from seed, purpose, round and client.

    Args:
        seed: The experiment's seed.
        purpose: What the numbers are for, e.g. ``"batches"``.
        round: Round number; set-up exchanges count up to 0.
        client: Client number; None on the server.

    Returns:
        The seed: equal for equal arguments, in any process and whatever ran before.

    Example:
        >>> derive_seed(0, "batches", 3, 1) == derive_seed(0, "batches", 3, 1)
        True
        >>> derive_seed(0, "batches", 3, 1) == derive_seed(0, "batches", 3, 2)
        False
    """
    text = f"{seed}/{purpose}/{round}/{client}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1


def generator(seed: int, purpose: str, round: int = 0, client: int | None = None) -> torch.Generator:
    """Returns a CPU generator seeded by `derive_seed`."""
    return torch.Generator().manual_seed(derive_seed(seed, purpose, round, client))


@contextmanager
def seeded(seed: int, purpose: str, round: int = 0, client: int | None = None) -> Iterator[None]:
    """Seeds torch's global generators for a block and restores them afterwards."""
    devices, number = list(range(torch.cuda.device_count())), derive_seed(seed, purpose, round, client)
    with torch.random.fork_rng(devices=devices):
        if devices or torch.backends.mps.is_available():
            torch.manual_seed(number)
        else:  # torch.manual_seed would record the call stack for each kind of device that the machine lacks
            torch.default_generator.manual_seed(number)
        yield


def numpy_generator(*key: object) -> np.random.Generator:
    """Returns the NumPy generator of a key.

    The key is hashed as text: the same key gives the same numbers in every process and on every machine, and
    keys that differ anywhere give unrelated numbers.

    Args:
        *key: What the numbers are for, for example ``(seed, "partition")``.

    Example:
        >>> bool(numpy_generator(0, "partition").random() == numpy_generator(0, "partition").random())
        True
        >>> bool(numpy_generator(0, "partition").random() == numpy_generator(1, "partition").random())
        False
    """
    return np.random.default_rng(int.from_bytes(hashlib.sha256(repr(key).encode()).digest()))


@dataclass(frozen=True)
class Context:
    """The position in an experiment at which code runs; the only source of randomness.

    Attributes:
        seed: The experiment's seed.
        round: Round number; set-up exchanges count up to 0, training rounds start at 1.
        client: Client number; None on the server.
        exchange: Index of the exchange in the round, from 0.
        stage: Index of the client's stage, from 0, where its data come in stages.
    """

    seed: int
    round: int
    client: int | None = None
    exchange: int = 0
    stage: int = 0

    @property
    def common(self) -> Context:
        """The context that server and clients share in a round: all of them draw the same numbers from it."""
        return Context(self.seed, self.round)

    def generator(self, purpose: str) -> torch.Generator:
        """Returns a CPU generator that depends only on seed, purpose, round, exchange and client."""
        return generator(self.seed, self._named(purpose), self.round, self.client)

    def seeded(self, purpose: str) -> AbstractContextManager[None]:
        """Seeds torch's global generators for a block and restores them afterwards."""
        return seeded(self.seed, self._named(purpose), self.round, self.client)

    def _named(self, purpose: str) -> str:
        """Returns the purpose, with the exchange's index for all but the first exchange of a round."""
        return f"{purpose}, exchange {self.exchange}" if self.exchange else purpose
