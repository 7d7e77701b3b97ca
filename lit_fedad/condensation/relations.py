"""The importance of images that a model predicts wrongly, and a loss that separates classes it confuses (FedVCK)."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def merged_prototypes(prototypes: Tensor, sizes: Tensor, classes: Tensor, count: int) -> Tensor:
    """Merges the clients' mean logits of each class, weighted by their images (FedVCK Eq. 12).

    Args:
        prototypes: Mean logits of each client's classes, client after client [n, K].
        sizes: Number of images that each mean is over, int64 [n].
        classes: Class of each mean, int64 [n].
        count: Number of classes K.

    Returns:
        Global logit prototypes, float32 [K, K]; a row of NaN for a class that no client holds.
    """
    total = torch.zeros(count, count, dtype=torch.float64)
    total.index_add_(0, classes, prototypes.double() * sizes[:, None])
    return (total / classes.bincount(sizes.double(), minlength=count)[:, None]).float()


def hard_negatives(prototypes: Tensor, present: Tensor, k: int) -> Tensor:
    """Selects the K classes that each class is most easily confused with (FedVCK Eq. 13).

    HN(c) = argtopK over j != c of p_c[j].

    Args:
        prototypes: Mean logits of each class [C, C]; rows of NaN if they are not known.
        present: Whether each class may be a negative, bool [C].
        k: Number of negatives K; if there are fewer other classes, all of them.

    Returns:
        Whether j is in HN(c), bool [C, C]. Never c itself; rows without logits are empty.
    """
    has_logits = ~prototypes.isnan().any(1)
    allowed = has_logits[:, None] & present & ~torch.eye(len(prototypes), dtype=torch.bool)
    ranked = prototypes.where(allowed, -torch.inf).argsort(dim=1, descending=True)[:, :k]
    return torch.zeros_like(allowed).scatter(1, ranked, True) & allowed


def class_means(features: Tensor, labels: Tensor, count: int) -> Tensor:
    """Computes feature prototypes: the mean feature of each class, of norm 1 (FedVCK Eq. 14).

    Args:
        features: Features [n, D].
        labels: Classes, int64 [n].
        count: Number of classes.

    Returns:
        Prototypes [count, D]; zeros for a class without images.
    """
    total = features.new_zeros(count, features.shape[1]).index_add_(0, labels, features)
    return F.normalize(total, dim=1)  # sum and mean have the same direction


class RelationalContrast(nn.Module):
    """Loss that moves features to the prototype of their class and away from those of its hard negatives.

    It is ``-log e^{h(z) . f_c / tau} / sum_j e^{h(z) . f_j / tau}``, with h a small network whose output has norm 1. In
    FedVCK Eq. 15, j runs only over the hard negatives, which leaves the loss without a lower bound; by default j also
    takes the class itself.

    Args:
        prototypes: Prototypes f_c of norm 1 [C, D]; zeros for classes that have none.
        negatives: Hard negatives HN, bool [C, C].
        hidden: Width of the hidden layer of h.
        temperature: Temperature tau.
        with_own: Whether the class itself is in the denominator.
        prior: Whether every class counts as often as the batch has images of it, in numerator and denominator, as in
            the released code, which sums over a batch's images instead of classes.
    """

    prototypes: Tensor
    candidates: Tensor

    def __init__(
        self,
        prototypes: Tensor,
        negatives: Tensor,
        hidden: int = 128,
        temperature: float = 1.0,
        with_own: bool = True,
        prior: bool = False,
    ) -> None:
        super().__init__()
        width = prototypes.shape[1]
        self.head = nn.Sequential(
            nn.Linear(width, hidden), nn.BatchNorm1d(hidden), nn.ReLU(), nn.Linear(hidden, width)
        )
        itself = torch.eye(len(prototypes), dtype=torch.bool) & negatives.any(1) & with_own
        self.register_buffer("prototypes", prototypes)
        self.register_buffer("candidates", negatives | itself)
        self.temperature, self.prior = temperature, prior

    def forward(self, features: Tensor, labels: Tensor) -> Tensor:
        """Computes the mean loss over images whose class has hard negatives and a prototype; 0 without any.

        With ``prior`` only classes count of which the batch has images.

        Args:
            features: Features [B, D], B > 1.
            labels: Classes, int64 [B].

        Returns:
            A scalar.
        """
        candidates = self.candidates
        similarity = F.normalize(self.head(features).float(), dim=1) @ self.prototypes.T / self.temperature
        if self.prior:
            counts = labels.bincount(minlength=len(self.prototypes))
            candidates = candidates & (counts > 0)
            similarity = similarity + counts.log()
        counted = candidates.any(1)[labels] & (self.prototypes[labels] != 0).any(1)
        denominator = similarity.where(candidates[labels], -torch.inf)[counted].logsumexp(1)
        numerator = similarity.gather(1, labels[:, None])[counted, 0]
        return (denominator - numerator).sum() / counted.sum().clamp(min=1)


def importance(
    current: Tensor, previous: Tensor, labels: Tensor, alpha: float = 0.5, bias: float = 0.0
) -> Tensor:
    """Computes the importance of images: w = 1 / (1 + exp(-err + b)), err the cross-entropy of two models' mean logits.

    It follows FedVCK Eq. 5, FedVCK Eq. 6 and FedVCK Eq. 7. The paper's models end in a softmax; here logits are mixed.
    The error of the current model alone would be biased by its overfitting.

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
