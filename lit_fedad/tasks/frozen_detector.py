"""What detectors of frozen features without training have in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lit_fedad.contracts import Context, Task
from lit_fedad.contracts.batches import map_batches
from lit_fedad.errors import UserError
from lit_fedad.models.frozen_encoder import FrozenEncoder


class FrozenDetector(Task):
    """A task that fits something to the frozen features of a client's images, once, and trains nothing.

    What is fitted are personal buffers. With one client that holds all images (``METHOD=centralised``) they are the
    pooled detector.

    Args:
        encoder: A `FrozenEncoder` without a network.

    Raises:
        UserError: If the encoder is trained.
    """

    trains = False
    prepares = True

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        if not isinstance(encoder, FrozenEncoder) or encoder.network is not None:
            raise UserError(
                f"task {type(self).__name__} looks at frozen features, and trains nothing: give features=frozen"
                " features.hidden=0"
            )
        self.encoder, self.num_features = encoder, encoder.num_features

    def fit(self, features: Tensor) -> None:
        """Fits the buffers to local features [n, C] of length 1, on the CPU."""
        raise NotImplementedError

    def forward(self, batch: Mapping[str, Any]) -> Tensor:
        """Computes features of length 1 [B, C]."""
        return self.encoder(batch["image"]) / self.encoder.length

    @torch.no_grad()
    def prepare(self, loader: DataLoader, context: Context) -> None:
        """Fits the detector to local images."""
        self.fit(torch.cat([features.float().cpu() for features in map_batches(self, loader, self)]))

    def objective(self, features: Tensor, batch: Mapping[str, Any]) -> dict[str, Tensor]:
        """Refuses to train.

        Raises:
            UserError: Always: there is nothing to train.
        """
        raise UserError(
            f"task {type(self).__name__} has nothing to train: give METHOD=local or centralised, and rounds=0"
        )

    def on_fit_start(self) -> None:
        """Refuses a plain Trainer; see `objective`."""
        self.objective(torch.empty(0), {})

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        """Loads a state with buffers of any size."""
        for name in self.local_buffers:
            if (entry := state_dict.get(f"{prefix}{name}")) is not None:
                setattr(self, name, torch.empty_like(entry, device=getattr(self, name).device))
        super()._load_from_state_dict(state_dict, prefix, *rest)
