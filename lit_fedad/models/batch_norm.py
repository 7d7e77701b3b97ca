"""Batch normalisation for batches that may hold one image."""

from torch import Tensor, nn
from torch.nn import functional as F


class BatchNorm(nn.BatchNorm2d):
    """Batch normalisation whose running statistics ignore a batch of one image.

    Last batches of one image are common among small clients. Such an image is normalised over its own positions, and
    the running statistics, which every prediction uses, do not move towards it. Where its map is 1x1, for which torch
    raises an error, the running statistics normalise it.

    Example:
        >>> import torch
        >>> norm = BatchNorm(1)
        >>> norm(torch.tensor([[[[3.0, 5.0]]]])).flatten().tolist()
        [-0.99..., 0.99...]
        >>> norm.running_mean.item()
        0.0
    """

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  (torch's name)
        """Normalises maps [B, C, H, W]."""
        if len(input) > 1 or not self.training:
            return super().forward(input)
        if input[0, 0].numel() > 1:
            return F.batch_norm(input, None, None, self.weight, self.bias, training=True, eps=self.eps)
        return F.batch_norm(
            input, self.running_mean, self.running_var, self.weight, self.bias, training=False, eps=self.eps
        )
