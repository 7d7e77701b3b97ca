"""AUPIMO and F1-max against plain loops, and all values against anomalib where it is installed."""

import math

import numpy as np
import pytest
import torch
from scipy.ndimage import gaussian_filter
from sklearn.metrics import average_precision_score, f1_score, roc_auc_score

from lit_fedad.metrics.anomaly import AnomalyMetrics
from lit_fedad.metrics.functional.bins import distinct_bins
from lit_fedad.metrics.functional.curves import aupimo, f1_max
from lit_fedad.metrics.functional.histograms import component_sizes, image_histograms, image_sizes

SIDE, NUMBER = 100, 20  # 10 normal images: 100,000 pixels, of which the bounds are one and ten


def images(seed=0):
    """Smooth maps on the scale of distances, and masks; every second image is normal."""
    random = np.random.default_rng(seed)
    noise = gaussian_filter(random.normal(size=(NUMBER, SIDE, SIDE)), (0, 2, 2))
    blobs = gaussian_filter(random.normal(size=(NUMBER, SIDE, SIDE)), (0, 4, 4)) > 0.1
    blobs[::2] = False
    maps = 30 + 20 * noise + 14 * gaussian_filter(blobs.astype(float), (0, 1, 1))
    return torch.from_numpy(maps).float(), torch.from_numpy(blobs)


def aupimo_by_loops(maps, masks, low=1e-5, high=1e-4):
    """Image by image: overlap over the logarithm of the rate, before and after each normal pixel is flagged."""
    normal = np.sort(maps[~masks.any((1, 2))].ravel())[::-1]
    areas = []
    for scores, mask in zip(maps, masks, strict=True):
        if not mask.any():
            continue
        inside, area = scores[mask], 0.0
        for k in range(1, 40):
            x0, x1 = math.log(k / len(normal)), math.log((k + 1) / len(normal))
            y0, y1 = (inside > normal[k]).mean(), (inside >= normal[k]).mean()
            start, end = max(x0, math.log(low)), min(x1, math.log(high))
            if start < end:
                heights = [y0 + (y1 - y0) * (x - x0) / (x1 - x0) for x in (start, end)]
                area += (end - start) * sum(heights) / 2
        areas.append(area / math.log(high / low))
    return np.mean(areas)


def exact_aupimo(maps, masks):
    """With one bin for every distinct score."""
    index, count = distinct_bins(maps)
    return aupimo(*image_histograms(index, image_sizes(component_sizes(masks)), count))


def test_up_to_a_rate_of_one_it_ends_where_all_is_flagged():
    """One of two normal pixels is flagged first, the other last: before it the image's four pixels, or with it."""
    normal = torch.tensor([1, 0, 1])
    for image, expected in ([0, 4, 0], 1.0), ([4, 0, 0], 0.5):
        assert float(aupimo(normal, torch.tensor(image), bounds=(0.5, 1.0))) == pytest.approx(expected)


def test_is_the_mean_of_the_images_areas():
    maps, masks = images()
    metrics = AnomalyMetrics()
    for start in range(0, NUMBER, 7):
        part = slice(start, start + 7)
        metrics.update(maps[part].amax((1, 2)), masks[part].any(2).any(1), maps[part], masks[part])
    expected = aupimo_by_loops(maps.numpy(), masks.numpy())
    assert 0.05 < expected < 0.95
    assert float(metrics.compute()["aupimo"]) == pytest.approx(expected, abs=0.01)
    assert float(exact_aupimo(maps, masks)) == pytest.approx(expected, abs=0.002)


def test_overlap_between_rates_lies_on_a_line_over_their_logarithm():
    """Rates of 0, 2e-6, 2e-5, 3e-4 and 1 at overlaps of 0, .2, .6, .9 and 1: both bounds lie between two."""
    normal, image = torch.tensor([999_700, 280, 18, 2]), torch.tensor([1, 3, 4, 2])
    first = 0.2 + 0.4 * math.log(5) / math.log(10)
    last = 0.6 + 0.3 * math.log(5) / math.log(15)
    area = (math.log(2) * (first + 0.6) + math.log(5) * (0.6 + last)) / 2
    assert float(aupimo(normal, image)) == pytest.approx(area / math.log(10), rel=1e-9)


def test_is_undefined_where_a_pixel_is_more_than_the_smallest_rate():
    histogram = torch.tensor([99_999, 0]), torch.tensor([0, 1])
    assert aupimo(*histogram).isnan()
    assert float(aupimo(histogram[0] + 1, histogram[1])) == 1


@pytest.mark.parametrize("seed", range(3))
def test_f1_max_is_the_largest_of_all_thresholds(seed):
    random = np.random.default_rng(seed)
    labels = random.random(60) < 0.3
    scores = np.round(random.normal(size=60) + labels, 1).astype(np.float32)
    expected = max(f1_score(labels, scores >= limit) for limit in scores)
    metrics = AnomalyMetrics(pixel=False)
    metrics.update(torch.from_numpy(scores), torch.from_numpy(labels))
    assert float(metrics.compute()["f1_max"]) == pytest.approx(expected, abs=1e-12)
    assert f1_max(torch.tensor([1, 0]), torch.tensor([0, 0])).isnan()


def test_pixel_average_precision_is_scikit_learns():
    maps, masks = images(1)
    metrics = AnomalyMetrics()
    metrics.update(maps.amax((1, 2)), masks.any(2).any(1), maps, masks)
    found = metrics.compute()
    truth, scores = masks.numpy().ravel(), maps.numpy().ravel()
    assert float(found["p_ap"]) == pytest.approx(average_precision_score(truth, scores), abs=1e-3)
    assert float(found["p_auroc"]) == pytest.approx(roc_auc_score(truth, scores), abs=1e-4)


@pytest.mark.parametrize("seed", range(3))
def test_is_anomalibs(seed):
    functional = pytest.importorskip("anomalib.metrics.pimo.functional")
    maps, masks = images(seed)
    *_, scores, _ = functional.aupimo_scores(maps, masks, num_thresholds=300_000, force=True)
    # With other numbers of pixels anomalib takes the nearest rate for a bound; here it is interpolated.
    assert float(exact_aupimo(maps, masks)) == pytest.approx(
        float(scores[masks.any(2).any(1)].mean()), abs=1e-3
    )
