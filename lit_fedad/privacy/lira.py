"""LiRA, the likelihood ratio attack on membership in the training data (Carlini et al., IEEE S&P 2022).

The attacker trains shadow models with and without each image, and tests under which of the two the confidence of the
attacked model in the image is likelier.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import mean

import numpy as np
import torch
from sklearn.metrics import roc_auc_score, roc_curve
from torch import Tensor

CLAMP = 1e-5
"""Least distance of probabilities from 0 and 1, and least standard deviation."""
OWN_VARIANCE = 64
"""Least number of shadow models for variances of each image of its own."""


def confidence(logits: Tensor, labels: Tensor) -> Tensor:
    """Computes the confidence of a classifier in the true class: ``phi = log p_y - log(1 - p_y)``.

    The difference of the true logit and the log-sum-exp of the others keeps the digits that 1 - p_y loses.

    Args:
        logits: Class logits [n, K].
        labels: True classes, int64 [n].

    Returns:
        float64 [n]; p_y is clamped to [`CLAMP`, 1 - `CLAMP`].

    Example:
        >>> confidence(torch.tensor([[0.0, 2.0], [99.0, 0.0]]), torch.tensor([1, 0])).tolist()
        [2.0, 11.51...]
    """
    logits, at = logits.double(), labels.unsqueeze(1)
    phi = logits.gather(1, at).squeeze(1) - logits.scatter(1, at, -torch.inf).logsumexp(1)
    limit = float(np.log((1 - CLAMP) / CLAMP))
    return phi.clamp(-limit, limit)


def online_scores(phi: Tensor, shadows: Tensor, trained_on: Tensor) -> Tensor:
    """Computes ``log N(phi | in) - log N(phi | out)`` with Gaussians fitted to the shadow models (online attack).

    Args:
        phi: Confidence of the attacked model in each example [n].
        shadows: Confidence of the J shadow models [J, n]; NaN where there is none.
        trained_on: Whether each shadow model was trained on each example, bool [J, n].

    Returns:
        Scores float64 [n], high for members; NaN for an example that no shadow model, or each, was trained on.
    """
    inside, outside = (_fit(shadows, trained_on), _fit(shadows, ~trained_on))
    return _log_density(phi, *inside) - _log_density(phi, *outside)


def offline_scores(phi: Tensor, shadows: Tensor, trained_on: Tensor) -> Tensor:
    """Computes ``log Phi((phi - mu_out) / sd_out)`` from the shadow models without the example (offline attack).

    The logarithm keeps the order of scores where Phi itself rounds to 1.

    Args:
        phi: As in `online_scores`.
        shadows: As in `online_scores`.
        trained_on: As in `online_scores`.

    Returns:
        Scores float64 [n], high for members; NaN for an example that each shadow model was trained on.
    """
    centre, deviation = _fit(shadows, ~trained_on)
    return torch.special.log_ndtr((phi.double() - centre) / deviation)


def roc(scores: Tensor, members: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Computes false and true positive rates at every threshold.

    Args:
        scores: Scores [n], high for members.
        members: Whether each example is a member, bool [n].

    Returns:
        False and true positive rates, both ascending.
    """
    false, true, _ = roc_curve(members.numpy(), scores.numpy(), drop_intermediate=False)
    return false, true


@dataclass(frozen=True)
class MembershipReport:
    """Success of the attack: how well each client's training images are distinguished from other images.

    Attributes:
        auc: Area under the ROC curve by client.
        tpr: True positive rate at a false positive rate of at most 1 % by client; below 100 non-members, at none.
        examples: Number of attacked members and non-members by client.
    """

    auc: dict[int, float]
    tpr: dict[int, float]
    examples: dict[int, int]

    @property
    def worst(self) -> float:
        """The largest max(0.5, AUC) over clients: an attack worse than guessing reveals nothing."""
        return max(max(0.5, auc) for auc in self.auc.values())

    @property
    def mean(self) -> float:
        """The mean over clients of max(0.5, AUC)."""
        return mean(max(0.5, auc) for auc in self.auc.values())

    @property
    def defence_rate(self) -> float:
        """Share of the clients with an AUC of at most 0.5."""
        return mean(float(auc <= 0.5) for auc in self.auc.values())


def membership_report(scores: Mapping[int, Tensor], members: Mapping[int, Tensor]) -> MembershipReport:
    """Evaluates the attack on each client; scores that are NaN are left out.

    Args:
        scores: Client -> scores [n], high for members.
        members: Client -> whether each example is a member, bool [n].

    Raises:
        ValueError: If a client has no member or no non-member with a score.

    Example:
        >>> report = membership_report({3: torch.tensor([2.0, 0.5, 1.0, 0.0])}, {3: torch.arange(4) < 2})
        >>> report.auc, report.tpr, report.worst, report.defence_rate
        ({3: 0.75}, {3: 0.5}, 0.75, 0.0)
    """
    auc, tpr, examples = {}, {}, {}
    for client, own in scores.items():
        kept = ~own.isnan()
        score, member = own[kept], members[client][kept]
        if member.all() or not member.any():
            raise ValueError(
                f"client {client}: members and non-members with a score are needed, one of each at least"
            )
        auc[client] = float(roc_auc_score(member.numpy(), score.numpy()))
        false, true = roc(score, member)
        tpr[client] = float(true[false <= 0.01].max())
        examples[client] = len(score)
    return MembershipReport(auc, tpr, examples)


def _fit(shadows: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of each example's chosen observations; NaN where there is none.

    Below `OWN_VARIANCE` shadow models one variance serves all examples: that of the observations around their
    example's mean.
    """
    values = torch.where(chosen, shadows.double(), torch.nan)
    counts = (~values.isnan()).sum(0)
    centre = values.nanmean(0)
    squares = (values - centre).square().nansum(0)
    if len(shadows) < OWN_VARIANCE:
        freedom = (counts - 1).clamp(min=0).sum().clamp(min=1)
        variance = squares.sum() / freedom
    else:
        variance = squares / (counts - 1).clamp(min=1)
    return centre, variance.sqrt().clamp(min=CLAMP)


def _log_density(value: Tensor, centre: Tensor, deviation: Tensor) -> Tensor:
    """Of a Gaussian, without its constant."""
    return -((value.double() - centre) / deviation).square() / 2 - deviation.log()
