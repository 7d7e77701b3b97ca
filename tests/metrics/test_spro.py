"""sPRO: a loop over thresholds and regions as the paper has it, PRO where nothing saturates, clients that merge."""

import numpy as np
import pytest
import torch

from lit_fedad.metrics.anomaly import AnomalyMetrics
from lit_fedad.metrics.functional.histograms import component_sizes

Image = tuple[torch.Tensor, torch.Tensor]


def images(seed: int = 0) -> list[Image]:
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
def test_it_is_that_of_a_loop_over_thresholds_and_regions(limit):
    values = seen(*images(), limit=limit).compute()
    assert float(values["spro"]) == pytest.approx(by_definition(images(), limit), abs=1e-5)


def test_where_the_area_is_the_whole_region_it_is_pro():
    draw = torch.Generator().manual_seed(1)
    masks = torch.rand(3, 12, 12, generator=draw) < 0.2
    maps = torch.rand(3, 12, 12, generator=draw) + 0.4 * masks
    regions = []
    for mask in masks:
        parts = torch.stack([component_sizes((mask & part)[None])[0] for part in _components(mask)])
        regions.append(parts)
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
    scores, areas = images()[0]
    empty = torch.zeros(1, 8, 8, dtype=torch.int32)
    with_empty = seen((scores, torch.cat([areas, empty])))
    assert with_empty.compute()["spro"] == seen((scores, areas)).compute()["spro"]


def test_clients_merge_bit_for_bit_in_any_order():
    whole = seen(*images())
    parts = [seen(image) for image in reversed(images())]
    merged = parts[0]
    for other in parts[1:]:
        merged.merge_state(other)
    assert merged.compute()["spro"] == whole.compute()["spro"]
    with pytest.raises(ValueError, match="different settings"):
        merged.merge_state(seen(limit=0.05))


def test_what_does_not_go_together_is_refused():
    with pytest.raises(ValueError, match="needs the histograms"):
        AnomalyMetrics(pixel=False, spro_limit=0.05)
    with pytest.raises(ValueError, match=r"\(0, 1\]"):
        AnomalyMetrics(spro_limit=0.0)
    metrics = AnomalyMetrics(spro_limit=0.05)
    scores, areas = images()[0]
    with pytest.raises(ValueError, match="needs regions"):
        metrics.update(torch.ones(1), torch.ones(1), scores[None], (areas > 0).any(0)[None])
    with pytest.raises(ValueError, match="needs regions"):
        metrics.update(torch.ones(1), torch.ones(1), scores[None], (areas > 0).any(0)[None], [areas[:, 1:]])


def _components(mask: torch.Tensor) -> list[torch.Tensor]:
    """The 8-connected components of a mask, by growing each from a pixel."""
    left, found = mask.clone(), []
    while left.any():
        part = torch.zeros_like(mask)
        part.view(-1)[left.flatten().nonzero()[0]] = True
        while True:
            near = torch.nn.functional.max_pool2d(part[None].float(), 3, 1, 1)[0] > 0
            if ((near & mask) == part).all():
                break
            part = near & mask
        found.append(part)
        left &= ~part
    return found
