"""The interface of training data that the federation uses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch.utils.data import DataLoader


class ClientData(Protocol):
    """Training data by client."""

    @property
    def milestones(self) -> frozenset[int]:
        """Rounds after which clients go on to other stages: these are evaluated."""

    @property
    def stages(self) -> Mapping[int, int]:
        """Stage of each client, from 0, where its data come in several."""

    @property
    def sizes(self) -> Mapping[int, int]:
        """Training images by client."""

    def client_loader(self, client: int, generator: torch.Generator, shuffle: bool = True) -> DataLoader:
        """Returns training batches of a client.

        Args:
            client: The client.
            generator: Decides the order of its images.
            shuffle: Whether the order is random; otherwise it is fixed.
        """

    def at(self, round: int) -> ClientData:
        """Returns what the clients hold in a round."""
