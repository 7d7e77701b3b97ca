"""PRO, the area under the per-region overlap curve: an exact form and a histogram form of fixed size."""

import torch
from torch import Tensor

from lit_fedad.metrics.base import MergeableMetric, check_same_shape, concatenated, kept
from lit_fedad.metrics.functional.bins import DEFAULT_BINS, LogBins, as_scores, distinct_bins
from lit_fedad.metrics.functional.curves import check_limit, pro
from lit_fedad.metrics.functional.histograms import component_sizes, pixel_histograms


class ExactPRO(MergeableMetric):
    """PRO over every distinct threshold; keeps every pixel (8 bytes each).

    A perfect map scores 1, a constant one limit / 2; NaN without a normal pixel or without a region.

    Args:
        limit: Largest false positive rate, in (0, 1].

    Example:
        >>> metric = ExactPRO()
        >>> metric.update(torch.tensor([[[9.0, 9.0], [1.0, 2.0]]]), torch.tensor([[[1, 1], [0, 0]]]))
        >>> metric.compute()
        tensor(1., dtype=torch.float64)
    """

    scores: list[Tensor]
    sizes: list[Tensor]

    def __init__(self, limit: float = 0.3) -> None:
        super().__init__(limit)
        check_limit(limit)
        self.limit = limit
        self.add_state("scores", default=[], dist_reduce_fx="cat")
        self.add_state("sizes", default=[], dist_reduce_fx="cat")

    def update(self, scores: Tensor, labels: Tensor) -> None:
        """Take in a batch.

        Args:
            scores: Anomaly maps, any real dtype, shape [B, H, W].
            labels: Ground truth, non-zero where anomalous, shape [B, H, W].

        Raises:
            ValueError: If the shapes differ or are not [B, H, W].
            UserError: If a score is NaN.
        """
        check_same_shape(scores, labels)
        sizes = component_sizes(labels)
        self.scores.append(kept(as_scores(scores), self.device))
        self.sizes.append(kept(sizes, self.device))

    def compute(self) -> Tensor:
        """PRO of all images seen, a float64 scalar."""
        index, count = distinct_bins(concatenated(self.scores))
        normal, _, region = pixel_histograms(index, concatenated(self.sizes), count)
        return pro(normal, region, self.limit)


class HistogramPRO(MergeableMetric):
    """PRO from two histograms of fixed size: constant memory in the number of images, mergeable.

    A perfect map scores 1, a constant one limit / 2; NaN without a normal pixel or without a region.

    Args:
        limit: Largest false positive rate, in (0, 1].
        bins: Resolution of the histogram.

    Example:
        >>> metric = HistogramPRO()
        >>> metric.update(torch.tensor([[[9.0, 9.0], [1.0, 2.0]]]), torch.tensor([[[1, 1], [0, 0]]]))
        >>> metric.compute()
        tensor(1., dtype=torch.float64)
    """

    normal: Tensor
    region: Tensor

    def __init__(self, limit: float = 0.3, bins: LogBins = DEFAULT_BINS) -> None:
        super().__init__(limit, bins)
        check_limit(limit)
        self.limit = limit
        self.bins = bins
        for name in ("normal", "region"):
            self.add_state(name, default=torch.zeros(bins.count, dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, scores: Tensor, labels: Tensor) -> None:
        """Take in a batch.

        Args:
            scores: Anomaly maps, any real dtype, shape [B, H, W].
            labels: Ground truth, non-zero where anomalous, shape [B, H, W].

        Raises:
            ValueError: If the shapes differ or are not [B, H, W].
            UserError: If a score is NaN.
        """
        check_same_shape(scores, labels)
        normal, _, region = pixel_histograms(
            self.bins.index(scores), component_sizes(labels), self.bins.count
        )
        self.normal = self.normal + normal.to(self.device)
        self.region = self.region + region.to(self.device)

    def compute(self) -> Tensor:
        """PRO of all images seen, a float64 scalar."""
        return pro(self.normal, self.region, self.limit)
