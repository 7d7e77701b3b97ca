"""The distance of a student's predictions from a teacher's."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F


def divergence(student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """Computes the batch mean of ``KL(softmax(teacher / T) || softmax(student / T))``, without the usual factor T^2.

    Args:
        student: The student's logits [B, K].
        teacher: The teacher's logits [B, K].
        temperature: Temperature T.
    """
    return F.kl_div(
        (student / temperature).log_softmax(1),
        (teacher / temperature).log_softmax(1),
        log_target=True,
        reduction="batchmean",
    )
