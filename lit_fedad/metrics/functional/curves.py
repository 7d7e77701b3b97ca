"""AUROC, average precision, PRO, F1 and AUPIMO from histograms over ordered bins, lowest score first.

Histograms are counts or weights, int64 [bins]; samples of one bin are tied. With one bin for every distinct score the
values are exact; with logarithmic bins the AUROC is off by at most half the share of (normal, anomalous) pairs that
fall into a common bin. Values are float64 scalars in [0, 1], and NaN without a normal or without an anomalous sample.
"""

import math

import torch
from torch import Tensor


def auroc(negative: Tensor, positive: Tensor) -> Tensor:
    """Computes the area under the ROC curve: the chance that an anomaly outscores a normal sample, ties counted half.

    The pairs are counted in whole numbers (Mann-Whitney U), so the order of samples, batches and clients
    has no effect, up to 10^11 samples of each kind.

    Example:
        >>> auroc(torch.tensor([2, 1, 0]), torch.tensor([0, 1, 1]))
        tensor(0.9167, dtype=torch.float64)
    """
    rank = 2 * negative.cumsum(0) - negative
    # In two parts: int64 does not hold the pairs of all clients' pixels.
    high, low = ((positive * part).sum().double() for part in (rank >> 24, rank & 0xFFFFFF))
    return (high * 2**24 + low) / (2 * negative.sum().double() * positive.sum().double())


def average_precision(negative: Tensor, positive: Tensor) -> Tensor:
    """Computes the area under the precision-recall curve as average precision, anomalies positive (AUPR).

    The sum over thresholds of precision times the step in recall, without interpolation, as in scikit-learn.

    Example:
        >>> average_precision(torch.tensor([0, 1, 0]), torch.tensor([1, 0, 1]))
        tensor(0.8333, dtype=torch.float64)
    """
    total = positive.sum()
    if not negative.sum() or not total:
        return _undefined(positive)
    from_the_top = positive.flip(0)
    hits = from_the_top.cumsum(0)
    flagged = hits + negative.flip(0).cumsum(0)
    return (from_the_top * hits.double() / flagged.clamp(min=1)).sum() / total


def pro(normal: Tensor, region: Tensor, limit: float = 0.3) -> Tensor:
    """Computes the area under the per-region overlap curve (AUPRO).

    Source: Bergmann et al., "The MVTec Anomaly Detection Dataset", IJCV 2021.

    At a threshold, the overlap is the mean over ground-truth regions of the share that is flagged, and the
    false positive rate (FPR) the share of all normal pixels of all images that is flagged. The overlap is
    integrated over the FPR from 0 to the limit, with linear interpolation between thresholds and at the
    limit, and divided by it.

    Args:
        normal: Counts of normal pixels.
        region: Region weight (see `pixel_histograms`); that of regions which saturate (see `saturated_histogram`) for
            sPRO, Bergmann et al., "Beyond Dents and Scratches", IJCV 2022.
        limit: Largest FPR, in (0, 1].

    Returns:
        1 for a perfect map, limit / 2 for a constant map and, on average, for a random one.

    Example:
        >>> pro(torch.tensor([5, 5, 0]), torch.tensor([0, 1, 1]), limit=0.25)
        tensor(0.6250, dtype=torch.float64)
    """
    if not normal.sum() or not region.sum():
        return _undefined(normal)
    fpr, overlap = _rate_from_the_top(normal), _rate_from_the_top(region)
    last = int((fpr <= limit).sum()) - 1
    following = min(last + 1, fpr.numel() - 1)
    width = fpr[following] - fpr[last]
    step = (limit - fpr[last]) / width if width > 0 else 0.0
    at_limit = overlap[last] + step * (overlap[following] - overlap[last])
    x = torch.cat([fpr[: last + 1], fpr.new_tensor([limit])])
    y = torch.cat([overlap[: last + 1], at_limit[None]])
    return torch.trapezoid(y, x) / limit


def f1_max(negative: Tensor, positive: Tensor) -> Tensor:
    """Computes the largest F1 score over all thresholds, anomalies positive.

    Example:
        >>> f1_max(torch.tensor([2, 1, 0]), torch.tensor([0, 1, 1]))
        tensor(0.8000, dtype=torch.float64)
    """
    total = positive.sum()
    if not negative.sum() or not total:
        return _undefined(positive)
    hits, false = positive.flip(0).cumsum(0), negative.flip(0).cumsum(0)
    return (2 * hits.double() / (hits + false + total)).max()


def aupimo(normal: Tensor, image: Tensor, bounds: tuple[float, float] = (1e-5, 1e-4)) -> Tensor:
    """Computes the mean over anomalous images of the area under their per-image overlap (AUPIMO).

    Source: Bertoldo et al., "AUPIMO", BMVC 2024 (arXiv 2401.01984).

    At a threshold, an image's overlap is the share of its anomalous pixels that is flagged, and the false positive rate
    (FPR) the share of the pixels of normal images. The overlap is integrated over the logarithm of the FPR between the
    bounds, with linear interpolation, and divided by its width. As all images share the FPR, the mean of their areas is
    the area under their mean overlap.

    Args:
        normal: Counts of pixels of normal images.
        image: Weight of anomalous pixels, equal in sum for every anomalous image.
        bounds: Smallest and largest FPR.

    Returns:
        The mean; NaN also with so few normal pixels that one of them is more than the smallest FPR.
    """
    low, high = bounds
    if not image.sum() or normal.sum() * low < 1:
        return _undefined(normal)
    fpr, overlap = _rate_from_the_top(normal), _rate_from_the_top(image)
    inside = (fpr > low) & (fpr < high)
    ends = [_at(fpr, overlap, bound) for bound in bounds]
    x = torch.cat([fpr.new_tensor([low]), fpr[inside], fpr.new_tensor([high])]).log()
    y = torch.cat([ends[0][None], overlap[inside], ends[1][None]])
    return torch.trapezoid(y, x) / (x[-1] - x[0])


def _at(fpr: Tensor, overlap: Tensor, bound: float) -> Tensor:
    """Interpolates the overlap at an FPR, linearly over the FPR's logarithm; below the first, as at an FPR of 0."""
    last = int((fpr <= bound).sum()) - 1
    if last + 1 == len(fpr) or fpr[last] == 0:
        return overlap[last]
    step = (math.log(bound) - fpr[last].log()) / (fpr[last + 1].log() - fpr[last].log())
    return overlap[last] + step * (overlap[last + 1] - overlap[last])


def _rate_from_the_top(histogram: Tensor) -> Tensor:
    """Computes the share flagged at every threshold, from above all scores (0) to below all (1), shape [bins + 1]."""
    flagged = histogram.flip(0).cumsum(0)
    return torch.cat([flagged.new_zeros(1), flagged]).double() / flagged[-1]


def _undefined(like: Tensor) -> Tensor:
    return torch.tensor(torch.nan, dtype=torch.float64, device=like.device)
