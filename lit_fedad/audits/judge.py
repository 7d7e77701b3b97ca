"""The judge of reconstructions, which ignores where in an image things lie."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from lit_fedad.models.backbones import OWN_NAME, create_backbone


class Judge:
    """Features without positions, by another backbone than the attacked one.

    It is the library's own; of runs with that backbone, one with random weights.

    Args:
        attacked: Provenance of the run's backbone (``taken``).
    """

    def __init__(self, attacked: Mapping[str, object]) -> None:
        weights = "random" if attacked.get("taken") == "own" else "own"
        self.name = f"{OWN_NAME}, weights {weights}"
        self.backbone = create_backbone(OWN_NAME, (1, 2, 3), weights)

    @torch.no_grad()
    def __call__(self, images: Tensor) -> Tensor:
        """Computes the mean over positions of each feature [n, D].

        Args:
            images: Pixels in [0, 1] [n, ch, H, W], of 1 or 3 channels.
        """
        mean, std = (
            torch.tensor(values).view(-1, 1, 1) for values in (self.backbone.mean, self.backbone.std)
        )
        parts = []
        for part in images.cpu().expand(-1, 3, -1, -1).split(32):
            pyramid = self.backbone((part - mean) / std)
            parts.append(torch.cat([layer.mean((2, 3)) for layer in pyramid], 1))
        return torch.cat(parts)
