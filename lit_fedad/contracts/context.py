"""Where in an experiment a piece of code runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from lit_fedad.contracts.randomness import generator, seeded


@dataclass(frozen=True)
class Context:
    """Where in the experiment a piece of code runs; the only source of randomness.

    Attributes:
        seed: The experiment's seed.
        round: Set-up exchanges count up to 0, training rounds from 1.
        client: Client number; None on the server.
        exchange: Which exchange of the round, from 0.
        stage: Which of the client's tasks, from 0, where its images come task after task.
    """

    seed: int
    round: int
    client: int | None = None
    exchange: int = 0
    stage: int = 0

    def generator(self, purpose: str) -> torch.Generator:
        """A CPU generator that depends on nothing but seed, purpose, round, exchange and client."""
        return generator(self.seed, self._named(purpose), self.round, self.client)

    @contextmanager
    def seeded(self, purpose: str) -> Iterator[None]:
        """Seeds torch's global generators for a block and restores them afterwards."""
        with seeded(self.seed, self._named(purpose), self.round, self.client):
            yield

    def _named(self, purpose: str) -> str:
        """Apart from what the first exchange of the round drew for the same purpose."""
        return f"{purpose}, exchange {self.exchange}" if self.exchange else purpose
