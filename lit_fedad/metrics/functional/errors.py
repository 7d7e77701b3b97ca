"""False and missing error (FE, ME) from histograms over ordered bins, lowest score first.

Source: FADngs Eq. 17, and the authors' rule for the threshold, which the paper does not give.
"""

import math

import torch
from torch import Tensor

_PERCENTILES = range(45, 56)


def balanced(negative: Tensor, positive: Tensor) -> tuple[Tensor, Tensor]:
    """Weights samples so that the normal and the anomalous ones have the same total weight.

    A normal sample weighs n_anomalous / n_normal times as much as an anomalous one. The weights are whole
    numbers in lowest terms, which keeps sums and ties exact: each sample counts as if it were repeated that
    often. With equal numbers both weights are 1.

    Args:
        negative: Counts of normal samples per bin, int64, shape [bins], not all zero.
        positive: Counts of anomalous samples per bin, int64, shape [bins], not all zero.

    Returns:
        Both histograms weighted, int64, shape [bins].

    Example:
        >>> balanced(torch.tensor([3, 1, 0]), torch.tensor([0, 2, 4]))
        (tensor([9, 3, 0]), tensor([0, 4, 8]))
    """
    normal, anomalous = int(negative.sum()), int(positive.sum())
    divisor = math.gcd(normal, anomalous)
    return negative * (anomalous // divisor), positive * (normal // divisor)


def percentile_threshold(negative: Tensor, positive: Tensor) -> int:
    """Finds the threshold of highest accuracy among the 45th to 55th percentile of all samples.

    It uses the labels, and it relies on histograms that are balanced. No score lies between a percentile
    and the sample next below it, so that sample's bin decides as the interpolated percentile would.

    Args:
        negative: Counts of normal samples per bin, int64, shape [bins], not all zero.
        positive: Counts of anomalous samples per bin, int64, shape [bins], not all zero.

    Returns:
        Number of the highest bin that is predicted normal; of equally accurate percentiles, the lowest one's.

    Example:
        >>> percentile_threshold(torch.tensor([2, 2, 0, 0]), torch.tensor([0, 0, 1, 3]))
        1
    """
    normal, anomalous = negative.cumsum(0), positive.cumsum(0)
    both = normal + anomalous
    ranks = torch.tensor(_PERCENTILES, device=both.device) * (both[-1] - 1) // 100
    bins = torch.searchsorted(both, ranks, right=True)
    correct = normal[bins] + anomalous[-1] - anomalous[bins]
    return int(bins[correct.argmax()])


def detection_errors(negative: Tensor, positive: Tensor, threshold: int) -> tuple[Tensor, Tensor]:
    """Computes false error FP / (TP + FP) and missing error FN / (TP + FN), anomalies positive (FADngs Eq. 17).

    That is, one minus precision and one minus recall.

    Args:
        negative: Counts of normal samples per bin, int64, shape [bins].
        positive: Counts of anomalous samples per bin, int64, shape [bins].
        threshold: Number of the highest bin that is predicted normal.

    Returns:
        FE and ME, float64 scalars in [0, 1]. FE is NaN if no sample is predicted anomalous, ME if none is.

    Example:
        >>> detection_errors(torch.tensor([2, 1, 1]), torch.tensor([1, 0, 3]), threshold=1)
        (tensor(0.2500, dtype=torch.float64), tensor(0.2500, dtype=torch.float64))
    """
    false_positives, true_positives = negative[threshold + 1 :].sum(), positive[threshold + 1 :].sum()
    anomalies = positive.sum()
    return (
        false_positives.double() / (true_positives + false_positives),
        (anomalies - true_positives).double() / anomalies,
    )
