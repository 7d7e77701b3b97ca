"""AUROC and average precision (AUPR) of anomaly scores, image-level or pixel-level.

Each comes in an exact form, which keeps all scores, and in a histogram form of fixed size. Neither rescales
the scores or assumes a range: torchmetrics' own binary metrics apply a sigmoid as soon as a score leaves [0,
1], which saturates on distances.
"""

import torch
from torch import Tensor

from lit_fedad.metrics.base import MergeableMetric, check_same_shape, concatenated, kept
from lit_fedad.metrics.functional.bins import DEFAULT_BINS, LogBins, as_scores, distinct_bins
from lit_fedad.metrics.functional.curves import auroc, average_precision
from lit_fedad.metrics.functional.histograms import label_histograms


class _Exact(MergeableMetric):
    scores: list[Tensor]
    labels: list[Tensor]

    def __init__(self) -> None:
        super().__init__()
        self.add_state("scores", default=[], dist_reduce_fx="cat")
        self.add_state("labels", default=[], dist_reduce_fx="cat")

    def update(self, scores: Tensor, labels: Tensor) -> None:
        """Take in a batch.

        Args:
            scores: Anomaly scores, any shape ([B] image-level, [B, H, W] pixel-level) and real dtype.
            labels: Same shape, non-zero where anomalous.

        Raises:
            ValueError: If the shapes differ.
            UserError: If a score is NaN.
        """
        check_same_shape(scores, labels)
        self.scores.append(kept(as_scores(scores), self.device))
        self.labels.append(kept(labels != 0, self.device))

    def _histograms(self) -> tuple[Tensor, Tensor]:
        index, count = distinct_bins(concatenated(self.scores))
        return label_histograms(index, concatenated(self.labels), count)


class _Histogram(MergeableMetric):
    negative: Tensor
    positive: Tensor

    def __init__(self, bins: LogBins = DEFAULT_BINS) -> None:
        super().__init__(bins)
        self.bins = bins
        for name in ("negative", "positive"):
            self.add_state(name, default=torch.zeros(bins.count, dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, scores: Tensor, labels: Tensor) -> None:
        """Take in a batch.

        Args:
            scores: Anomaly scores, any shape ([B] image-level, [B, H, W] pixel-level) and real dtype.
            labels: Same shape, non-zero where anomalous.

        Raises:
            ValueError: If the shapes differ.
            UserError: If a score is NaN.
        """
        check_same_shape(scores, labels)
        negative, positive = label_histograms(self.bins.index(scores), labels, self.bins.count)
        self.negative = self.negative + negative.to(self.device)
        self.positive = self.positive + positive.to(self.device)


class ExactAUROC(_Exact):
    """Rank-based AUROC, ties counted half; keeps every score (8 bytes a sample).

    NaN without a normal or without an anomalous sample.

    Example:
        >>> metric = ExactAUROC()
        >>> metric.update(torch.tensor([31.0, 29.0, 40.0, 30.0]), torch.tensor([0, 0, 1, 1]))
        >>> metric.compute()
        tensor(0.7500, dtype=torch.float64)
    """

    def compute(self) -> Tensor:
        """AUROC of all samples seen, a float64 scalar."""
        return auroc(*self._histograms())


class HistogramAUROC(_Histogram):
    """AUROC from two histograms of fixed size: constant memory, mergeable.

    Off by at most half the share of (normal, anomalous) pairs that fall into a common bin; NaN without a
    normal or without an anomalous sample.

    Args:
        bins: Resolution of the histogram.

    Example:
        >>> metric = HistogramAUROC()
        >>> metric.update(torch.tensor([31.0, 29.0, 40.0, 30.0]), torch.tensor([0, 0, 1, 1]))
        >>> metric.compute()
        tensor(0.7500, dtype=torch.float64)
    """

    def compute(self) -> Tensor:
        """AUROC of all samples seen, a float64 scalar."""
        return auroc(self.negative, self.positive)


class ExactAveragePrecision(_Exact):
    """Average precision (AUPR); keeps every score (8 bytes a sample).

    NaN without a normal or without an anomalous sample.

    Example:
        >>> metric = ExactAveragePrecision()
        >>> metric.update(torch.tensor([31.0, 29.0, 40.0, 30.0]), torch.tensor([0, 0, 1, 1]))
        >>> metric.compute()
        tensor(0.8333, dtype=torch.float64)
    """

    def compute(self) -> Tensor:
        """Average precision of all samples seen, a float64 scalar."""
        return average_precision(*self._histograms())


class HistogramAveragePrecision(_Histogram):
    """Average precision (AUPR) from two histograms of fixed size: constant memory, mergeable.

    All anomalies of a bin take the precision at its lower end, so the value is low by the precision lost over
    half a bin: 5e-4 on normal distances of 30 and anomalous ones of 40, both with a standard deviation of 5.
    NaN without a normal or without an anomalous sample.

    Args:
        bins: Resolution of the histogram.

    Example:
        >>> metric = HistogramAveragePrecision()
        >>> metric.update(torch.tensor([31.0, 29.0, 40.0, 30.0]), torch.tensor([0, 0, 1, 1]))
        >>> metric.compute()
        tensor(0.8333, dtype=torch.float64)
    """

    def compute(self) -> Tensor:
        """Average precision of all samples seen, a float64 scalar."""
        return average_precision(self.negative, self.positive)
