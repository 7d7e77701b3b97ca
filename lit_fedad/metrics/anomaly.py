"""The four figures of anomaly detection in one metric: I-AUROC, AUPR, P-AUROC and PRO."""

import torch
from torch import Tensor

from lit_fedad.metrics.base import MergeableMetric, check_same_shape, concatenated, kept
from lit_fedad.metrics.functional.bins import DEFAULT_BINS, LogBins, as_scores, distinct_bins
from lit_fedad.metrics.functional.curves import auroc, average_precision, check_limit, pro
from lit_fedad.metrics.functional.histograms import component_sizes, label_histograms, pixel_histograms


class AnomalyMetrics(MergeableMetric):
    """I-AUROC and AUPR of image scores, P-AUROC and PRO of anomaly maps.

    Image scores are few and kept as they are. Pixels go into three histograms of fixed size (2.8 MB in all at
    the default resolution) that hold no image, mask or single score, and that add up over clients; P-AUROC
    and PRO share them, so a pixel is binned once. All values are micro: over all images and pixels seen,
    normal images included.

    Args:
        pixel: Whether to score anomaly maps, for which masks are needed.
        exact: Whether to keep every pixel (8 bytes each) in place of histograms: a reference for small test sets.
        limit: Largest false positive rate of PRO, in (0, 1].
        bins: Resolution of the histograms.

    Example:
        >>> metrics = AnomalyMetrics()
        >>> maps = torch.tensor([[[31.0, 30.0], [30.0, 30.0]], [[30.0, 45.0], [32.0, 30.0]]])
        >>> masks = torch.tensor([[[0, 0], [0, 0]], [[0, 1], [0, 0]]])
        >>> metrics.update(maps.amax(dim=(1, 2)), torch.tensor([0, 1]), maps, masks)
        >>> {name: round(float(value), 4) for name, value in metrics.compute().items()}
        {'i_auroc': 1.0, 'aupr': 1.0, 'p_auroc': 1.0, 'pro': 1.0}
    """

    image_scores: list[Tensor]
    image_labels: list[Tensor]
    pixel_scores: list[Tensor]
    pixel_sizes: list[Tensor]
    normal: Tensor
    anomalous: Tensor
    region: Tensor

    def __init__(
        self, pixel: bool = True, exact: bool = False, limit: float = 0.3, bins: LogBins = DEFAULT_BINS
    ) -> None:
        super().__init__(pixel, exact, limit, bins)
        check_limit(limit)
        self.pixel = pixel
        self.exact = exact
        self.limit = limit
        self.bins = bins
        image_lists = ("image_scores", "image_labels")
        pixel_lists = ("pixel_scores", "pixel_sizes") if pixel and exact else ()
        for name in image_lists + pixel_lists:
            self.add_state(name, default=[], dist_reduce_fx="cat")
        for name in ("normal", "anomalous", "region") if pixel and not exact else ():
            self.add_state(name, default=torch.zeros(bins.count, dtype=torch.int64), dist_reduce_fx="sum")

    def update(
        self,
        image_scores: Tensor,
        labels: Tensor,
        anomaly_maps: Tensor | None = None,
        masks: Tensor | None = None,
    ) -> None:
        """Adds a batch.

        Args:
            image_scores: Anomaly scores of the images, any real dtype, shape [B].
            labels: Non-zero where the image is anomalous, shape [B].
            anomaly_maps: Anomaly scores of the pixels, any real dtype, shape [B, H, W]; unused if `pixel` is
                off.
            masks: Ground truth, non-zero where anomalous, shape [B, H, W]; unused if `pixel` is off.

        Raises:
            ValueError: If shapes differ, or if `pixel` is on and maps or masks are missing.
            UserError: If a score is NaN.
        """
        check_same_shape(image_scores, labels)
        scores = as_scores(image_scores)
        if self.pixel:
            if anomaly_maps is None or masks is None:
                raise ValueError("pixel metrics need anomaly_maps and masks; use pixel=False without them")
            check_same_shape(anomaly_maps, masks)
            self._update_pixels(anomaly_maps, component_sizes(masks))
        self.image_scores.append(kept(scores, self.device))
        self.image_labels.append(kept(labels != 0, self.device))

    def compute(self) -> dict[str, Tensor]:
        """Computes `i_auroc`, `aupr` and, if `pixel` is on, `p_auroc` and `pro`.

        Returns:
            Values by name, float64 scalars. A value is NaN where it is undefined: without normal or anomalous
            samples, or without a region. With several processes, torchmetrics first gathers the states of all.
        """
        return self.compute_local()

    def compute_local(self) -> dict[str, Tensor]:
        """Computes the same values as `compute` from the samples of this process alone, such as one client's."""
        index, count = distinct_bins(concatenated(self.image_scores))
        images = label_histograms(index, concatenated(self.image_labels), count)
        values = {"i_auroc": auroc(*images), "aupr": average_precision(*images)}
        if self.pixel:
            normal, anomalous, region = self._pixel_histograms()
            values |= {"p_auroc": auroc(normal, anomalous), "pro": pro(normal, region, self.limit)}
        return values

    def _update_pixels(self, maps: Tensor, sizes: Tensor) -> None:
        if self.exact:
            self.pixel_scores.append(kept(as_scores(maps), self.device))
            self.pixel_sizes.append(kept(sizes, self.device))
            return
        normal, anomalous, region = pixel_histograms(self.bins.index(maps), sizes, self.bins.count)
        self.normal = self.normal + normal.to(self.device)
        self.anomalous = self.anomalous + anomalous.to(self.device)
        self.region = self.region + region.to(self.device)

    def _pixel_histograms(self) -> tuple[Tensor, Tensor, Tensor]:
        if not self.exact:
            return self.normal, self.anomalous, self.region
        index, count = distinct_bins(concatenated(self.pixel_scores))
        return pixel_histograms(index, concatenated(self.pixel_sizes), count)
