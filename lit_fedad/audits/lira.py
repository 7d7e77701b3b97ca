"""LiRA, the likelihood ratio attack on membership in the training data (Carlini et al., IEEE S&P 2022).

The attacker trains shadow models with and without each image, and tests under which of the two what it sees of the
attacked model is likelier. What it sees of an image is a number, such as a confidence, or several together.
"""

import torch
from torch import Tensor

LEAST_DEVIATION = 1e-5
"""Least standard deviation of a statistic over shadow models."""
OWN_VARIANCE = 64
"""Least number of shadow models with which each image gets variances of its own."""
_SHRINKAGE = 1e-3  # of correlations towards 0: two equal statistics must not make a singular matrix


def confidence(logits: Tensor, labels: Tensor) -> Tensor:
    """Computes the confidence of a classifier in the true class: ``phi = log p_y - log(1 - p_y)``.

    The difference of the true logit and the log-sum-exp of the others keeps the digits that 1 - p_y loses; nothing is
    clamped, since images that are learnt by heart differ in these digits.

    Args:
        logits: Class logits [n, K], K of at least 2.
        labels: True classes, int64 [n].

    Returns:
        float64 [n].
    """
    logits, index = logits.double(), labels.unsqueeze(1)
    return logits.gather(1, index).squeeze(1) - logits.scatter(1, index, -torch.inf).logsumexp(1)


def likelihood_ratios(phi: Tensor, shadows: Tensor, trained_on: Tensor) -> Tensor:
    """Computes ``log N(phi | in) - log N(phi | out)`` with Gaussians fitted to the shadow models (online attack).

    Args:
        phi: One statistic of the attacked model for each example [n], or several [n, d].
        shadows: Those of the J shadow models [J, n] or [J, n, d]; NaN where there is none.
        trained_on: Whether each shadow model was trained on each example, bool [J, n].

    Returns:
        Scores float64 [n], high for members; NaN for an example that no shadow model, or each, was trained on.
    """
    if phi.ndim == 1:
        phi, shadows = phi.unsqueeze(-1), shadows.unsqueeze(-1)
    phi, shadows = phi.double(), shadows.double()
    inside, outside = (_fit(shadows, trained_on), _fit(shadows, ~trained_on))
    return _log_density(phi, *inside) - _log_density(phi, *outside)


def exchangeable_scores(phi: Tensor, trained_on: Tensor) -> Tensor:
    """Attacks each shadow model in turn, with Gaussians of the others but the one that completes its pair.

    The attacked model is then drawn like the models that it is compared with, so that only membership tells them apart.
    Shadow models 0 and 1, 2 and 3 and so on were trained on complementary halves.

    Args:
        phi: Statistics of the J shadow models [J, n] or [J, n, d]; NaN where there is none.
        trained_on: Whether each was trained on each example, bool [J, n].

    Returns:
        Their `likelihood_ratios` [J, n].
    """
    pair = torch.arange(len(phi)) // 2
    others = [pair != attacked_pair for attacked_pair in pair]
    ratios = [likelihood_ratios(phi[j], phi[mask], trained_on[mask]) for j, mask in enumerate(others)]
    return torch.stack(ratios)


def _fit(shadows: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Fits mean [n, d], standard deviation and correlation to each example's chosen observations; NaN without any.

    Below `OWN_VARIANCE` shadow models one covariance serves all examples: that of the observations around their
    example's mean.
    """
    values = torch.where(chosen.unsqueeze(-1), shadows, torch.nan)
    present = ~values.isnan().any(-1)
    counts = present.sum(0)
    values = torch.where(present.unsqueeze(-1), values, torch.nan)
    centre = values.nanmean(0)
    gaps = (values - centre).nan_to_num(0.0)
    products = torch.einsum("jnd,jne->nde", gaps, gaps)
    degrees_of_freedom = (counts - 1).clamp(min=0)
    if len(shadows) < OWN_VARIANCE:
        products, degrees_of_freedom = products.sum(0, keepdim=True), degrees_of_freedom.sum(0, keepdim=True)
    covariance = products / degrees_of_freedom.clamp(min=1)[:, None, None]
    deviation = covariance.diagonal(dim1=-2, dim2=-1).sqrt().clamp(min=LEAST_DEVIATION)
    correlation = covariance / (deviation.unsqueeze(-1) * deviation.unsqueeze(-2))
    correlation = (1 - _SHRINKAGE) * correlation
    correlation.diagonal(dim1=-2, dim2=-1).fill_(1.0)
    return centre, deviation, correlation


def _log_density(value: Tensor, centre: Tensor, deviation: Tensor, correlation: Tensor) -> Tensor:
    """Computes the log density of a Gaussian, without its constant."""
    root = torch.linalg.cholesky(correlation)
    z = ((value - centre) / deviation).unsqueeze(-1)
    whitened = torch.linalg.solve_triangular(root.expand(len(z), -1, -1), z, upper=False)
    volume = deviation.log().sum(-1) + root.diagonal(dim1=-2, dim2=-1).log().sum(-1)
    return -whitened.square().sum((-2, -1)) / 2 - volume
