"""Which real images to condense: those that the model gets wrong (FedVCK, Eqs. 5-8)."""

from torch import Tensor
from torch.nn import functional as F


def importance(
    current: Tensor, previous: Tensor, labels: Tensor, alpha: float = 0.5, bias: float = 0.0
) -> Tensor:
    """How important images are: w = 1 / (1 + exp(-err + b)), err the cross-entropy of two models' mixed logits.

    FedVCK, Eqs. 5-7. The error of the current model alone would be skewed by what it overfits.

    Args:
        current: Logits of the model as it is [n, K].
        previous: Logits of the model as it was one round ago [n, K].
        labels: int64 [n].
        alpha: Share of the current model.
        bias: b: the error at which an image is half as important as can be.

    Returns:
        float32 [n], each in (0, 1).

    Example:
        >>> import torch
        >>> right, wrong = torch.tensor([[9.0, 0.0]]), torch.tensor([[0.0, 9.0]])
        >>> label = torch.tensor([0])
        >>> [round(importance(x, x, label).item(), 2) for x in (right, wrong)]
        [0.5, 1.0]
    """
    error = F.cross_entropy(alpha * current + (1 - alpha) * previous, labels, reduction="none")
    return (error - bias).sigmoid()


def chances(weights: Tensor) -> Tensor:
    """P_w of the images of one class: their importance over its sum (FedVCK, Eq. 8).

    Args:
        weights: Of one class [n].

    Returns:
        Probabilities [n].
    """
    return weights / weights.sum()
