"""PRO and sPRO, as `AnomalyMetrics` gives them: against plain loops over thresholds, regions and pixels."""

import numpy as np
import pytest
import torch
from scipy.ndimage import gaussian_filter

from lit_fedad.metrics.anomaly import AnomalyMetrics
from lit_fedad.metrics.functional.bins import DEFAULT_BINS, distinct_bins
from lit_fedad.metrics.functional.curves import pro
from lit_fedad.metrics.functional.histograms import REGION_WEIGHT, component_sizes, pixel_histograms


def flood_fill(mask: np.ndarray) -> list[set[tuple[int, int]]]:
    """8-connected components of one mask, pixel by pixel."""
    left = {(int(y), int(x)) for y, x in zip(*np.nonzero(mask), strict=True)}
    components = []
    while left:
        front = [left.pop()]
        component = set(front)
        while front:
            y, x = front.pop()
            near = {(y + dy, x + dx) for dy in (-1, 0, 1) for dx in (-1, 0, 1)} & left
            left -= near
            component |= near
            front += near
        components.append(component)
    return components


def pro_by_loops(maps: np.ndarray, masks: np.ndarray, limit: float) -> float:
    """The definition, with one pass over all regions and pixels for every distinct threshold."""
    regions = [(image, component) for image, mask in enumerate(masks) for component in flood_fill(mask)]
    rates, overlaps = [0.0], [0.0]
    for threshold in sorted(set(maps.ravel().tolist()), reverse=True):
        flagged = maps >= threshold
        rates.append(flagged[masks == 0].mean())
        shares = [np.mean([flagged[image][pixel] for pixel in component]) for image, component in regions]
        overlaps.append(np.mean(shares))
    area = 0.0
    for x0, x1, y0, y1 in zip(rates[:-1], rates[1:], overlaps[:-1], overlaps[1:], strict=True):
        if x0 < limit:
            end = min(x1, limit)
            y_end = y0 + (y1 - y0) * (end - x0) / (x1 - x0) if x1 > x0 else y1
            area += (end - x0) * (y0 + y_end) / 2
    return area / limit


def images(seed: int = 0, n: int = 4, side: int = 24) -> tuple[torch.Tensor, torch.Tensor]:
    """Smooth maps on the scale of distances; all images but the first have anomalies of several sizes."""
    random = np.random.default_rng(seed)
    noise = gaussian_filter(random.normal(size=(n, side, side)), (0, 2, 2))
    blobs = gaussian_filter(random.normal(size=(n, side, side)), (0, 1.5, 1.5)) > 0.22
    blobs[0] = False
    maps = 30 + 20 * noise + 6 * gaussian_filter(blobs.astype(float), (0, 1, 1))
    return torch.from_numpy(maps).float(), torch.from_numpy(blobs)


def pro_of(maps: torch.Tensor, masks: torch.Tensor, **settings) -> torch.Tensor:
    metrics = AnomalyMetrics(**settings)
    metrics.update(maps.flatten(1).amax(1), masks.flatten(1).any(1), maps, masks)
    return metrics.compute()["pro"]


def exact_pro(maps: torch.Tensor, masks: torch.Tensor, limit: float = 0.3) -> torch.Tensor:
    """With one bin for every distinct score."""
    index, count = distinct_bins(maps)
    normal, _, region = pixel_histograms(index, component_sizes(masks), count)
    return pro(normal, region, limit)


@pytest.mark.parametrize("limit", [0.05, 0.3, 1.0])
def test_exact_with_ties_is_the_definition(limit):
    maps, masks = images()
    maps = maps.round()
    assert maps.unique().numel() < 60
    expected = pro_by_loops(maps.numpy(), masks.numpy(), limit)
    assert exact_pro(maps, masks, limit) == pytest.approx(expected, abs=1e-9)


def test_histogram_is_close_to_exact():
    data = images(n=20, side=128)
    assert pro_of(*data) == pytest.approx(float(exact_pro(*data)), abs=1e-4)


def test_regions_count_alike_whatever_their_size():
    # Scores 9 8 | 7 7 | 5 ... : the single pixel is found at FPR 0, the four others only at FPR 1/2.
    maps = torch.tensor([[[9.0, 1.0, 4.0, 4.0], [7.0, 1.0, 4.0, 4.0]]])
    masks = torch.tensor([[[1, 0, 1, 1], [0, 0, 1, 1]]])
    # Normal pixels 7, 1, 1: overlap is 1/2 up to FPR 1/3, where it becomes 1.
    assert pro_of(maps, masks, limit=1.0) == pytest.approx(1 / 3 * 0.5 + 2 / 3, abs=1e-12)
    assert pro_of(maps, masks, limit=0.3) == pytest.approx(0.5, abs=1e-12)


def test_up_to_a_rate_of_five_per_cent_it_has_a_name_of_its_own():
    data = images(n=20, side=64)
    metrics = AnomalyMetrics()
    metrics.update(data[0].flatten(1).amax(1), data[1].flatten(1).any(1), *data)
    assert metrics.compute()["pro_05"] == pro_of(*data, limit=0.05) != pro_of(*data)


def test_interpolates_linearly_at_the_limit():
    # One region, half of it found at FPR 0; the other half is tied with the first half of the normal pixels,
    # so overlap climbs from 1/2 at FPR 0 to 1 at FPR 1/2 and passes 0.8 at FPR 0.3.
    maps = torch.tensor([[[9.0, 5.0, 5.0, 1.0]]])
    masks = torch.tensor([[[1, 1, 0, 0]]])
    assert pro_of(maps, masks) == pytest.approx((0.5 + 0.8) / 2, abs=1e-12)


def test_a_threshold_exactly_at_the_limit():
    # FPR 0, 1/4, 1/2, ...; the region is found at FPR 1/4, which a limit of 1/4 must not count.
    maps = torch.tensor([[[9.0, 5.0, 4.0, 3.0, 2.0]]])
    masks = torch.tensor([[[0, 1, 0, 0, 0]]])
    assert pro_of(maps, masks, limit=0.25) == 0
    assert pro_of(maps, masks, limit=0.5) == 0.5


@pytest.mark.parametrize("limit", [0.1, 0.3, 1.0])
def test_perfect_constant_and_inverted_maps(limit):
    _, masks = images()
    perfect = 30 + 10 * masks.float()
    assert pro_of(perfect, masks, limit=limit) == 1
    assert pro_of(-perfect, masks, limit=limit) == (0 if limit < 1 else pytest.approx(0, abs=1e-12))
    assert pro_of(torch.full_like(perfect, 30), masks, limit=limit) == pytest.approx(limit / 2, abs=1e-12)


def test_components_are_those_of_a_flood_fill():
    _, masks = images(seed=5, n=6, side=32)
    expected = np.zeros(masks.shape, dtype=int)
    for image, mask in enumerate(masks.numpy()):
        for component in flood_fill(mask):
            for y, x in component:
                expected[image, y, x] = len(component)
    np.testing.assert_array_equal(component_sizes(masks).numpy(), expected)


def test_region_weights_add_up_to_the_number_of_regions():
    maps, masks = images(n=20, side=64)
    _, _, region = pixel_histograms(DEFAULT_BINS.index(maps), component_sizes(masks), DEFAULT_BINS.count)
    regions = sum(len(flood_fill(mask)) for mask in masks.numpy())
    assert float(region.sum()) / REGION_WEIGHT == pytest.approx(regions, rel=1e-9)


def test_undefined_without_region_or_normal_pixel():
    maps, masks = images()
    assert pro_of(maps, torch.zeros_like(masks)).isnan()
    assert pro_of(maps, torch.ones_like(masks)).isnan()


@pytest.mark.parametrize("limit", [0.0, -0.1, 1.1])
def test_impossible_limits_are_refused(limit):
    with pytest.raises(ValueError, match="limit"):
        AnomalyMetrics(limit=limit)


# ------------------------------------------------------------------------------------------------ sPRO

Image = tuple[torch.Tensor, torch.Tensor]


def saturating(seed: int = 0) -> list[Image]:
    """Maps [8, 8] and areas of saturation: two overlapping regions, one, none."""
    draw = torch.Generator().manual_seed(seed)
    areas = [torch.zeros(count, 8, 8, dtype=torch.int32) for count in (2, 1, 0)]
    areas[0][0, 1:4, 1:4] = 4
    areas[0][1, 3:5, 3:7] = 8
    areas[1][0, 5:7, 0:6] = 3
    inside = torch.stack([(area > 0).any(0) for area in areas])
    ranks = (torch.rand(3, 8, 8, generator=draw) + 0.5 * inside).flatten().argsort().argsort().view(3, 8, 8)
    return list(zip(1 + ranks / 1024, areas, strict=True))  # every score has a bin of its own


def seen(*images: Image, limit: float = 0.3) -> AnomalyMetrics:
    metrics = AnomalyMetrics(spro_limit=limit)
    for scores, areas in images:
        mask = (areas > 0).any(0)
        metrics.update(scores.amax()[None], mask.any()[None], scores[None], mask[None], [areas])
    return metrics


def by_definition(images: list[Image], limit: float) -> float:
    """The area under the mean saturated overlap of all regions, threshold by threshold."""
    maps = np.stack([scores.numpy() for scores, _ in images])
    inside = np.stack([(areas > 0).any(0).numpy() for _, areas in images])
    rates, overlaps = [0.0], [0.0]
    for threshold in np.unique(maps)[::-1]:
        flagged = maps >= threshold
        rates.append((flagged & ~inside).sum() / (~inside).sum())
        overlaps.append(
            np.mean(
                [
                    min((flagged[place] & (region.numpy() > 0)).sum() / region.max().item(), 1)
                    for place, (_, areas) in enumerate(images)
                    for region in areas
                ]
            )
        )
    fine = np.linspace(0, limit, 200_001)
    return float(np.trapezoid(np.interp(fine, rates, overlaps), fine) / limit)


@pytest.mark.parametrize("limit", [0.05, 0.3, 1.0])
def test_spro_is_that_of_a_loop_over_thresholds_and_regions(limit):
    values = seen(*saturating(), limit=limit).compute()
    assert float(values["spro"]) == pytest.approx(by_definition(saturating(), limit), abs=1e-5)


def test_spro_is_pro_where_the_area_is_the_whole_region():
    draw = torch.Generator().manual_seed(1)
    masks = torch.rand(3, 12, 12, generator=draw) < 0.2
    maps = torch.rand(3, 12, 12, generator=draw) + 0.4 * masks
    regions = []
    for mask in masks:
        components = flood_fill(mask.numpy())
        areas = torch.zeros(len(components), 12, 12, dtype=torch.int32)
        for area, component in zip(areas, components, strict=True):
            area[tuple(torch.tensor(sorted(component)).T)] = len(component)
        regions.append(areas)
    metrics = AnomalyMetrics(spro_limit=0.3)
    metrics.update(maps.amax((1, 2)), masks.any((1, 2)), maps, masks, regions)
    values = metrics.compute()
    assert values["spro"] == values["pro"]


def test_a_found_part_of_a_region_is_enough():
    areas = torch.zeros(1, 8, 8, dtype=torch.int32)
    areas[0, :4] = 2
    scores = torch.zeros(8, 8)
    scores[0, :2] = 1.0  # two of its 32 pixels, and no normal one
    normal = torch.zeros(8, 8), torch.zeros(0, 8, 8, dtype=torch.int32)
    values = seen((scores, areas), normal).compute()
    assert float(values["spro"]) == pytest.approx(1.0, abs=1e-9)
    assert float(values["pro"]) < 0.3


def test_a_region_without_pixels_has_no_weight():
    scores, areas = saturating()[0]
    empty = torch.zeros(1, 8, 8, dtype=torch.int32)
    with_empty = seen((scores, torch.cat([areas, empty])))
    assert with_empty.compute()["spro"] == seen((scores, areas)).compute()["spro"]


def test_clients_merge_bit_for_bit_in_any_order():
    whole = seen(*saturating())
    parts = [seen(image) for image in reversed(saturating())]
    merged = parts[0]
    for other in parts[1:]:
        merged.merge_state(other)
    assert merged.compute()["spro"] == whole.compute()["spro"]
    with pytest.raises(ValueError, match="different settings"):
        merged.merge_state(seen(limit=0.05))


def test_spro_without_what_it_needs_is_refused():
    with pytest.raises(ValueError, match="needs the histograms"):
        AnomalyMetrics(pixel=False, spro_limit=0.05)
    with pytest.raises(ValueError, match=r"\(0, 1\]"):
        AnomalyMetrics(spro_limit=0.0)
    metrics = AnomalyMetrics(spro_limit=0.05)
    scores, areas = saturating()[0]
    with pytest.raises(ValueError, match="needs regions"):
        metrics.update(torch.ones(1), torch.ones(1), scores[None], (areas > 0).any(0)[None])
    with pytest.raises(ValueError, match="needs regions"):
        metrics.update(torch.ones(1), torch.ones(1), scores[None], (areas > 0).any(0)[None], [areas[:, 1:]])
