"""The position in an experiment at which code runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from lit_fedad.contracts.randomness import generator, seeded


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
        """The same round for everyone: what it draws is equal on the server and at every client."""
        return Context(self.seed, self.round)

    def generator(self, purpose: str) -> torch.Generator:
        """Returns a CPU generator that depends only on seed, purpose, round, exchange and client."""
        return generator(self.seed, self._named(purpose), self.round, self.client)

    @contextmanager
    def seeded(self, purpose: str) -> Iterator[None]:
        """Seeds torch's global generators for a block and restores them afterwards."""
        with seeded(self.seed, self._named(purpose), self.round, self.client):
            yield

    def _named(self, purpose: str) -> str:
        """Returns the purpose, with the exchange's index for all but the first exchange of a round."""
        return f"{purpose}, exchange {self.exchange}" if self.exchange else purpose
