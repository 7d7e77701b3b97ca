"""Accuracy of predictions that look at no image: the least that a classifier must exceed."""

import torch
from torch import Tensor

CONSTANTS = ("client_largest", "global_largest", "random")
"""Always the client's largest class; always the largest class of all clients; any class of the client's at random."""


def constant_accuracies(counts: Tensor, weights: Tensor) -> dict[str, float]:
    """Computes the accuracy that is expected of each of `CONSTANTS`, mean over clients.

    Args:
        counts: Training images of each client and class [N, K]. A client without any is left out.
        weights: Weight of each class in the test data of each client [N, K], of any sum. A client whose
            weights are all zero is left out.

    Returns:
        Accuracies by name; NaN where no client is left.

    Example:
        >>> constant_accuracies(torch.tensor([[6, 2], [0, 3]]), torch.tensor([[3, 1], [0, 1]]))
        {'client_largest': 0.875, 'global_largest': 0.375, 'random': 0.75}
    """
    held = (counts.sum(1) > 0) & (weights.sum(1) > 0)
    counts, shares = counts[held].double(), weights[held].double()
    shares = shares / shares.sum(1, keepdim=True)
    present = (counts > 0).double()
    chances = {
        "client_largest": _one_hot(counts.argmax(1), counts),
        "global_largest": _one_hot(counts.sum(0).argmax(), counts),
        "random": present / present.sum(1, keepdim=True),
    }
    return {name: float((chance * shares).sum(1).mean()) for name, chance in chances.items()}


def _one_hot(classes: Tensor, counts: Tensor) -> Tensor:
    return torch.nn.functional.one_hot(classes, counts.shape[1]).double().expand_as(counts)
