"""Importance of real images for condensation: high for those that the model misclassifies (FedVCK)."""

from torch import Tensor
from torch.nn import functional as F


def importance(
    current: Tensor, previous: Tensor, labels: Tensor, alpha: float = 0.5, bias: float = 0.0
) -> Tensor:
    """Computes the importance of images: w = 1 / (1 + exp(-err + b)), err the cross-entropy of two models' mean logits.

    FedVCK Eq. 5, FedVCK Eq. 6, FedVCK Eq. 7. The error of the current model alone would be biased by its overfitting.

    Args:
        current: Logits of the current model [n, K].
        previous: Logits of the model of the round before [n, K].
        labels: Classes, int64 [n].
        alpha: Share of the current model.
        bias: Error b at which the importance is one half.

    Returns:
        Importance, float32 [n], each in (0, 1).

    Example:
        >>> import torch
        >>> right, wrong = torch.tensor([[9.0, 0.0]]), torch.tensor([[0.0, 9.0]])
        >>> label = torch.tensor([0])
        >>> [round(importance(x, x, label).item(), 2) for x in (right, wrong)]
        [0.5, 1.0]
    """
    error = F.cross_entropy(alpha * current + (1 - alpha) * previous, labels, reduction="none")
    return (error - bias).sigmoid()
