"""Anomaly maps: scores of patches, interpolated to pixels."""

import numpy as np
import torch
from scipy.ndimage import gaussian_filter1d
from torch import Tensor, nn
from torch.nn import functional as F

from lit_fedad.contracts.precision import full_precision
from lit_fedad.guards.bounds import at_least


class AnomalyMap(nn.Module):
    """Bilinear upsampling followed by a Gaussian blur, as two small matrix products.

    Both steps are linear and separable: along each side they are one matrix A [size, grid], and a map is A S A^T.

    Args:
        grid: Side of the patch grid.
        size: Side of the image, in pixels.
        sigma: Standard deviation of the blur, in pixels of the image; 0 for none.
    """

    def __init__(self, grid: int, size: int, sigma: float = 4.0) -> None:
        super().__init__()
        at_least("task", 1, grid=grid, image_size=size)
        at_least("task", 0, sigma=sigma)
        identity = torch.eye(grid)[:, None]
        side = F.interpolate(identity, size=size, mode="linear", align_corners=False)[:, 0].T.numpy()
        if sigma > 0:
            side = gaussian_filter1d(side.astype(np.float64), sigma, axis=0, mode="reflect")
        self.register_buffer(
            "side", torch.from_numpy(np.ascontiguousarray(side, dtype=np.float32)), persistent=False
        )

    def forward(self, scores: Tensor) -> Tensor:
        """Interpolates and blurs patch scores to anomaly maps.

        Args:
            scores: Patch scores [B, grid, grid].

        Returns:
            Anomaly maps [B, size, size].
        """
        side: Tensor = self.side  # type: ignore[assignment]
        with full_precision(scores):  # rounded to half precision, images near a threshold would tie
            return side @ scores.float() @ side.T
