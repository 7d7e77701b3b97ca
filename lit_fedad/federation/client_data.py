"""What the federation needs of training data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch.utils.data import DataLoader


class ClientData(Protocol):
    """Training data by client; classes that inherit from this hold the same in every round."""

    @property
    def milestones(self) -> frozenset[int]:
        """Rounds after which clients go on to other stages: these are evaluated."""
        return frozenset()

    @property
    def stages(self) -> Mapping[int, int]:
        """Stage of each client, where its data come in several."""
        return dict.fromkeys(self.sizes, 0)

    @property
    def sizes(self) -> Mapping[int, int]:
        """Training images by client."""

    def client_loader(self, client: int, generator: torch.Generator, shuffle: bool = True) -> DataLoader:
        """Returns training batches of a client."""

    def at(self, round: int) -> ClientData:
        """Returns what the clients hold in a round."""
        return self
