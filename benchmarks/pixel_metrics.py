"""Time, accuracy and memory of the pixel metrics on 200 maps of 224 x 224, against the exact values.

Compares the histograms of `AnomalyMetrics` with torchmetrics' exact BinaryAUROC (scores scaled to [0, 1]
first, or it would squash them) plus the per-region overlap at 200 equally spaced thresholds, region by
region.
"""

import time
from collections.abc import Callable

import numpy as np
import torch
from scipy import ndimage
from torch import Tensor
from torchmetrics import CatMetric, Metric
from torchmetrics.classification import BinaryAUROC

from lit_fedad.metrics.anomaly import AnomalyMetrics
from lit_fedad.metrics.functional.bins import distinct_bins
from lit_fedad.metrics.functional.curves import auroc, pro
from lit_fedad.metrics.functional.histograms import component_sizes, pixel_histograms

Scored = tuple[Metric, float, float]
Contestant = Callable[[Tensor, Tensor], Scored]

IMAGES, SIDE, BATCH, THRESHOLDS, LIMIT = 200, 224, 20, 200, 0.3


def synthetic_maps(images: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Smoothed maps on the scale of distances; every other image has one to three round anomalies."""
    random = np.random.default_rng(seed)
    rows, columns = np.mgrid[:SIDE, :SIDE]
    masks = np.zeros((images, SIDE, SIDE), dtype=bool)
    for mask in masks[1::2]:
        for _ in range(random.integers(1, 4)):
            (y, x), radius = random.uniform(0, SIDE, 2), random.uniform(4, 30)
            mask |= (rows - y) ** 2 + (columns - x) ** 2 <= radius**2
    texture = np.stack([ndimage.gaussian_filter(random.normal(size=mask.shape), 4) for mask in masks])
    bumps = np.stack([ndimage.gaussian_filter(mask.astype(float), 6) for mask in masks])
    maps = 30 + 2.5 * texture / texture.std() + 10 * bumps
    return torch.from_numpy(maps).float(), torch.from_numpy(masks)


def with_histograms(maps: Tensor, masks: Tensor) -> Scored:
    """P-AUROC and PRO of `AnomalyMetrics`, image values included."""
    metrics = AnomalyMetrics(limit=LIMIT)
    for scores, truth in zip(maps.split(BATCH), masks.split(BATCH), strict=True):
        metrics.update(scores.amax(dim=(1, 2)), truth.flatten(1).any(1), scores, truth)
    values = metrics.compute()
    return metrics, float(values["p_auroc"]), float(values["pro"])


def with_every_score(maps: Tensor, masks: Tensor) -> Scored:
    """The same with one threshold for every distinct score, which are all kept."""
    index, count = distinct_bins(maps)
    normal, anomalous, region = pixel_histograms(index, component_sizes(masks), count)
    kept = CatMetric()
    kept.update(maps)
    return kept, float(auroc(normal, anomalous)), float(pro(normal, region, LIMIT))


def with_loops(maps: Tensor, masks: Tensor) -> Scored:
    """P-AUROC of torchmetrics; PRO threshold by threshold and region by region."""
    low, high = maps.min(), maps.max()
    metric = BinaryAUROC()
    for scores, truth in zip(maps.split(BATCH), masks.split(BATCH), strict=True):
        metric.update((scores - low) / (high - low), truth.long())
    scores, truth = maps.numpy(), masks.numpy()
    regions = []
    for image, mask in enumerate(truth):
        labels, count = ndimage.label(mask, structure=np.ones((3, 3)))
        regions += [scores[image][labels == region] for region in range(1, count + 1)]
    normal = scores[~truth]
    thresholds = np.linspace(scores.max(), scores.min(), THRESHOLDS)
    fpr = np.array([0.0, *((normal >= threshold).mean() for threshold in thresholds)])
    overlap = np.array(
        [0.0, *(np.mean([(region >= threshold).mean() for region in regions]) for threshold in thresholds)]
    )
    inside = fpr <= LIMIT
    x = np.append(fpr[inside], LIMIT)
    y = np.append(overlap[inside], np.interp(LIMIT, fpr, overlap))
    return metric, float(metric.compute()), float(np.trapezoid(y, x) / LIMIT)


def pixel_state_bytes(metric: Metric) -> int:
    """Bytes the states take, the image scores of `AnomalyMetrics` left out."""
    states = [state for name, state in metric.metric_state.items() if not name.startswith("image_")]
    return sum(part.nbytes for state in states for part in ([state] if isinstance(state, Tensor) else state))


def timed(score: Contestant, maps: Tensor, masks: Tensor, repeats: int = 3) -> tuple[Scored, float]:
    """What the contestant returns, and the seconds of its best run."""
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        scored = score(maps, masks)
        seconds.append(time.perf_counter() - start)
    return scored, min(seconds)


def main() -> None:
    """Prints seconds, distance from the exact values, and bytes of state for 20 and for 200 images."""
    maps, masks = synthetic_maps(IMAGES)
    contestants = {
        "histograms": with_histograms,
        "torchmetrics + loops": with_loops,
        "every score kept": with_every_score,
    }
    results = {name: timed(score, maps, masks) for name, score in contestants.items()}
    (_, exact_auroc, exact_pro), _ = results["every score kept"]
    print(
        f"{IMAGES} maps of {SIDE} x {SIDE}, {maps.numel() / 1e6:.1f} million pixels, batches of {BATCH}, ",
        end="",
    )
    print(f"{torch.get_num_threads()} thread(s), best of 3")
    print(f"{'':22}seconds   P-AUROC   off by       PRO   off by   MB for 20 and {IMAGES} images")
    for name, ((metric, area, overlap), seconds) in results.items():
        few, _, _ = contestants[name](maps[:20], masks[:20])
        print(
            f"{name:22}{seconds:7.3f}{area:10.6f}{abs(area - exact_auroc):9.0e}"
            f"{overlap:10.6f}{abs(overlap - exact_pro):9.0e}"
            f"{pixel_state_bytes(few) / 1e6:12.2f} {pixel_state_bytes(metric) / 1e6:7.2f}"
        )
    ratio = results["torchmetrics + loops"][1] / results["histograms"][1]
    print(f"histograms are {ratio:.1f} times as fast as torchmetrics + loops")


if __name__ == "__main__":
    main()
