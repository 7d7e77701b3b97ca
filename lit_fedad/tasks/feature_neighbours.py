"""Nearest neighbours of frozen features: DN2 (Bergman et al., 2020, arXiv 2002.10445)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lit_fedad.contracts import Prediction
from lit_fedad.errors import UserError
from lit_fedad.guards.bounds import at_least
from lit_fedad.memory.knn import nearest
from lit_fedad.tasks.frozen_detector import FrozenDetector


class FeatureNeighbours(FrozenDetector):
    """The score is the sum of squared distances to the nearest frozen features of the client's images.

    `Panda` before training is the same, with the banks of all clients or the client's own.

    Args:
        encoder: See `FrozenDetector`.
        neighbours: Number of nearest features.

    Raises:
        UserError: If there are no neighbours.
    """

    local_buffers = ("bank",)
    scoring_buffers = local_buffers
    bank: Tensor

    def __init__(self, encoder: nn.Module, neighbours: int = 2) -> None:
        super().__init__(encoder)
        at_least("task", 1, neighbours=neighbours)
        self.neighbours = neighbours
        self.register_buffer("bank", torch.empty(0, self.num_features))

    def fit(self, features: Tensor) -> None:
        """Fills the bank."""
        self.bank = features.to(self.bank)

    def predict(self, features: Tensor, batch: Mapping[str, Any]) -> Prediction:
        """Computes each image's sum of squared distances."""
        if not len(self.bank):
            raise UserError("there is no bank to score by: the client has no images")
        distances, _ = nearest(features.float(), self.bank, min(self.neighbours, len(self.bank)))
        return Prediction(image_score=distances.square().sum(1))
