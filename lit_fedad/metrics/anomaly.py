"""All values of anomaly detection in one metric: those of images, and those of pixels."""

from collections.abc import Sequence

import torch
from torch import Tensor

from lit_fedad.metrics.base import MergeableMetric, check_same_shape, concatenated, flat_copy
from lit_fedad.metrics.functional.bins import DEFAULT_BINS, as_scores, distinct_bins
from lit_fedad.metrics.functional.curves import aupimo, auroc, average_precision, f1_max, pro
from lit_fedad.metrics.functional.histograms import (
    component_sizes,
    image_histograms,
    image_sizes,
    label_histograms,
    pixel_histograms,
    saturated_histogram,
)

PIXELS = ("normal", "anomalous", "region", "normal_images", "image")
"""Names of the pixel histograms of `AnomalyMetrics`: counts of normal and of anomalous pixels, weight of regions, count
of pixels of normal images, weight of anomalous images."""


class AnomalyMetrics(MergeableMetric):
    """I-AUROC, AUPR and F1-max of image scores; P-AUROC, PRO, average precision and AUPIMO of anomaly maps.

    Image scores are few and kept as they are. Pixels go into five histograms of fixed size (4.6 MB in all)
    that hold no image, mask or single score, and that add up over clients; all values
    share them, so a pixel is binned once. All values are micro: over all images and pixels seen, normal
    images included. Of regions that saturate (MVTec LOCO) a sixth histogram gives sPRO.

    Args:
        pixel: Whether to score anomaly maps, for which masks are needed.
        limit: Largest false positive rate of ``pro``, in (0, 1].
        spro_limit: Largest false positive rate of ``spro``, in (0, 1], for regions that saturate; None leaves it out.

    Raises:
        ValueError: If a limit is out of range, or ``spro_limit`` is given without pixels.

    Example:
        >>> metrics = AnomalyMetrics()
        >>> maps = torch.tensor([[[31.0, 30.0], [30.0, 30.0]], [[30.0, 45.0], [32.0, 30.0]]])
        >>> masks = torch.tensor([[[0, 0], [0, 0]], [[0, 1], [0, 0]]])
        >>> metrics.update(maps.amax(dim=(1, 2)), torch.tensor([0, 1]), maps, masks)
        >>> {name: round(float(value), 4) for name, value in metrics.compute().items()}
        {'i_auroc': 1.0, 'aupr': 1.0, 'f1_max': 1.0, 'p_auroc': 1.0, 'pro': 1.0, 'pro_05': 1.0, 'p_ap': 1.0,
         'aupimo': nan}
    """

    image_scores: list[Tensor]
    image_labels: list[Tensor]
    normal: Tensor
    anomalous: Tensor
    region: Tensor
    normal_images: Tensor
    image: Tensor
    saturated: Tensor

    def __init__(
        self,
        pixel: bool = True,
        limit: float = 0.3,
        spro_limit: float | None = None,
    ) -> None:
        super().__init__(pixel, limit, spro_limit)
        for rate in (limit, spro_limit):
            if rate is not None and not 0 < rate <= 1:
                raise ValueError(f"the FPR limit of PRO must lie in (0, 1], got {rate}")
        if spro_limit is not None and not pixel:
            raise ValueError("spro needs the histograms of pixels")
        self.pixel, self.limit, self.spro_limit = pixel, limit, spro_limit
        for name in ("image_scores", "image_labels"):
            self.add_state(name, default=[], dist_reduce_fx="cat")
        for name in (*(PIXELS if pixel else ()), *(() if spro_limit is None else ("saturated",))):
            self.add_state(
                name, default=torch.zeros(DEFAULT_BINS.count, dtype=torch.int64), dist_reduce_fx="sum"
            )

    def update(
        self,
        image_scores: Tensor,
        labels: Tensor,
        anomaly_maps: Tensor | None = None,
        masks: Tensor | None = None,
        regions: Sequence[Tensor] | None = None,
    ) -> None:
        """Adds a batch.

        Args:
            image_scores: Anomaly scores of the images, any real dtype, shape [B] or, as anomalib has it, [B, 1].
            labels: Non-zero where the image is anomalous, shape [B] or [B, 1].
            anomaly_maps: Anomaly scores of the pixels, any real dtype, shape [B, H, W] or [B, 1, H, W]; unused if
                `pixel` is off.
            masks: Ground truth, non-zero where anomalous, of either shape; unused if `pixel` is off.
            regions: For each image int32 [regions, H, W]: the area of saturation of a region, in pixels, on its pixels,
                0 elsewhere; unused without `spro_limit`.

        Raises:
            ValueError: If shapes differ, or if maps, masks or regions are needed and missing.
            UserError: If a score is NaN.
        """
        image_scores, labels = _without_channel(image_scores, 1), _without_channel(labels, 1)
        check_same_shape(image_scores, labels)
        scores = as_scores(image_scores)
        if self.pixel:
            if anomaly_maps is None or masks is None:
                raise ValueError("pixel metrics need anomaly_maps and masks; use pixel=False without them")
            anomaly_maps, masks = _without_channel(anomaly_maps, 3), _without_channel(masks, 3)
            check_same_shape(anomaly_maps, masks)
            if len(anomaly_maps) != len(scores):
                raise ValueError(
                    f"{len(scores)} image scores and {len(anomaly_maps)} maps are of different images"
                )
            if self.spro_limit is not None:
                self._update_regions(anomaly_maps, regions)
            self._update_pixels(anomaly_maps, component_sizes(masks))
        self.image_scores.append(flat_copy(scores, self.device))
        self.image_labels.append(flat_copy(labels != 0, self.device))

    def compute_local(self) -> dict[str, Tensor]:
        """Computes `i_auroc`, `aupr`, `f1_max` and, if `pixel` is on, `p_auroc`, `pro`, `pro_05`, `p_ap`, `aupimo`.

        With `spro_limit` also `spro`.

        Returns:
            Values by name, float64 scalars. A value is NaN where it is undefined: without normal or anomalous
            samples, or without a region; `aupimo` also with fewer than 100,000 pixels of normal images.
        """
        index, count = distinct_bins(concatenated(self.image_scores))
        images = label_histograms(index, concatenated(self.image_labels), count)
        values = {
            "i_auroc": auroc(*images),
            "aupr": average_precision(*images),
            "f1_max": f1_max(*images),
        }
        if self.pixel:
            values |= {
                "p_auroc": auroc(self.normal, self.anomalous),
                "pro": pro(self.normal, self.region, self.limit),
                "pro_05": pro(self.normal, self.region, 0.05),
                "p_ap": average_precision(self.normal, self.anomalous),
                "aupimo": aupimo(self.normal_images, self.image),
            }
            if self.spro_limit is not None:
                values["spro"] = pro(self.normal, self.saturated, self.spro_limit)
        return values

    def _update_pixels(self, maps: Tensor, sizes: Tensor) -> None:
        index, count = DEFAULT_BINS.index(maps), DEFAULT_BINS.count
        histograms = (
            *pixel_histograms(index, sizes, count),
            *image_histograms(index, image_sizes(sizes), count),
        )
        for name, histogram in zip(PIXELS, histograms, strict=True):
            setattr(self, name, getattr(self, name) + histogram.to(self.device))

    def _update_regions(self, maps: Tensor, regions: Sequence[Tensor] | None) -> None:
        if regions is None or [region.shape[1:] for region in regions] != [scores.shape for scores in maps]:
            raise ValueError("spro needs regions [regions, H, W] of every image")
        for scores, areas in zip(maps, regions, strict=True):
            histogram = saturated_histogram(DEFAULT_BINS.index(scores), areas, DEFAULT_BINS.count)
            self.saturated = self.saturated + histogram.to(self.device)


def _without_channel(values: Tensor, dimensions: int) -> Tensor:
    """Drops a second dimension of size 1 of values that have one dimension more."""
    return values.squeeze(1) if values.ndim == dimensions + 1 and values.shape[1] == 1 else values
