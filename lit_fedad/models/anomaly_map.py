"""Anomaly maps: scores of patches, interpolated to pixels."""

from collections.abc import Sequence

import numpy as np
import torch
from scipy.ndimage import gaussian_filter1d
from torch import Tensor, nn
from torch.nn import functional as F

from lit_fedad.contracts.compute import full_precision
from lit_fedad.core.bounds import at_least, pair


class AnomalyMap(nn.Module):
    """Bilinear upsampling followed by a Gaussian blur, as two small matrix products.

    Both steps are linear and separable: along each side they are one matrix A [pixels, patches], and the map of scores
    S is A_rows S A_columns^T.

    Args:
        grid: Patches a side, or rows and columns of patches.
        size: Pixels a side of the image, or its height and width.
        sigma: Standard deviation of the blur, in pixels of the image; 0 for none.
    """

    rows: Tensor
    columns: Tensor

    def __init__(self, grid: int | Sequence[int], size: int | Sequence[int], sigma: float = 4.0) -> None:
        super().__init__()
        at_least("task", 0, sigma=sigma)
        (rows, columns), (height, width) = pair("task.grid", grid), pair("task.image_size", size)
        self.register_buffer("rows", _side(rows, height, sigma), persistent=False)
        self.register_buffer("columns", _side(columns, width, sigma), persistent=False)

    def forward(self, scores: Tensor) -> Tensor:
        """Interpolates and blurs patch scores to anomaly maps.

        Args:
            scores: Patch scores [B, rows, columns].

        Returns:
            Anomaly maps [B, H, W].
        """
        with full_precision(scores):  # rounded to half precision, images near a threshold would tie
            return self.rows @ scores.float() @ self.columns.T


def _side(patches: int, pixels: int, sigma: float) -> Tensor:
    """Interpolates and blurs one side: a matrix [pixels, patches]."""
    identity = torch.eye(patches)[:, None]
    side = F.interpolate(identity, size=pixels, mode="linear", align_corners=False)[:, 0].T.numpy()
    if sigma > 0:
        side = gaussian_filter1d(side.astype(np.float64), sigma, axis=0, mode="reflect")
    return torch.from_numpy(np.ascontiguousarray(side, dtype=np.float32))
