"""The interface of training data that the federation uses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch.utils.data import DataLoader


class ClientData(Protocol):
    """Training data by client; by default the same in every round."""

    @property
    def milestones(self) -> frozenset[int]:
        """Rounds after which clients go on to other stages; the federation evaluates after each."""
        return frozenset()

    @property
    def stages(self) -> Mapping[int, int]:
        """Stage of each client, where its data come in several."""
        return dict.fromkeys(self.sizes, 0)

    @property
    def sizes(self) -> Mapping[int, int]:
        """Training images by client."""

    def client_loader(self, client: int, generator: torch.Generator, shuffle: bool = True) -> DataLoader:
        """Returns the training batches of a client.

        Args:
            client: Client number.
            generator: Source of the random order.
            shuffle: Whether the order is random; otherwise it is fixed.
        """

    def at(self, round: int) -> ClientData:
        """Returns the clients' training data in a round."""
        return self
