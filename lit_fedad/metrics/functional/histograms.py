"""Histograms of normal and anomalous samples, and of ground-truth regions, over ordered bins."""

import numpy as np
import torch
from scipy import ndimage
from torch import Tensor

# A region weighs this much, shared equally by its pixels. Whole numbers add up to the same sum in any order,
# so merged clients give bit for bit the pooled result; the rounding of 1/n is below n * 5e-13 for a region of
# n pixels, and eight million regions fit into int64.
REGION_WEIGHT = 1 << 40

# 8-connectivity inside an image, none between the images of a batch: [3 images, 3 rows, 3 columns].
_EIGHT_NEIGHBOURS = np.zeros((3, 3, 3), dtype=bool)
_EIGHT_NEIGHBOURS[1] = True


def label_histograms(index: Tensor, labels: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Counts normal and anomalous samples per bin, both int64 [count], of bins [n] and labels, n elements."""
    positive = torch.bincount(index[labels.flatten().to(index.device) != 0], minlength=count)
    return torch.bincount(index, minlength=count) - positive, positive


def component_sizes(masks: Tensor) -> Tensor:
    """Computes the size of the ground-truth region of every pixel.

    Regions are the 8-connected components of each mask, labelled on the CPU.

    Args:
        masks: Ground truth, non-zero where anomalous [B, H, W].

    Returns:
        Number of pixels of the pixel's region, 0 for normal pixels; int32 [B, H, W], on the CPU.

    Raises:
        ValueError: If the masks are not [B, H, W].
    """
    if masks.ndim != 3:
        raise ValueError(f"masks must be [B, H, W], got {tuple(masks.shape)}")
    regions, _ = ndimage.label((masks != 0).cpu().numpy(), structure=_EIGHT_NEIGHBOURS)
    sizes = np.bincount(regions.ravel(), minlength=1).astype(np.int32)
    sizes[0] = 0
    return torch.from_numpy(sizes[regions])


def image_sizes(sizes: Tensor) -> Tensor:
    """Computes the number of anomalous pixels of the image of every anomalous pixel.

    Args:
        sizes: 0 for normal pixels [B, H, W], as of `component_sizes`.

    Returns:
        The number on anomalous pixels, 0 on normal pixels of their images, -1 on images without any; int32 [B, H, W].
    """
    totals = (sizes != 0).sum((1, 2), keepdim=True, dtype=torch.int32)
    inside = torch.where(sizes != 0, totals, 0)
    return torch.where(totals == 0, -1, inside).int()


def image_histograms(index: Tensor, sizes: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Counts the pixels of normal images per bin, and sums `REGION_WEIGHT` / size over anomalous ones, int64 [count].

    Args:
        index: Bin of every pixel [n].
        sizes: `image_sizes`, n elements.
        count: Number of bins.
    """
    sizes = sizes.flatten().to(index.device)
    normal = torch.bincount(index[sizes < 0], minlength=count)
    _, _, image = pixel_histograms(index, sizes.clamp(min=0), count)
    return normal, image


def pixel_histograms(index: Tensor, sizes: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Counts normal pixels, anomalous pixels and region weight per bin.

    Args:
        index: Bin of every pixel [n].
        sizes: Size of every pixel's region, 0 for normal pixels, n elements (see `component_sizes`).
        count: Number of bins.

    Returns:
        Both counts, and the sum of `REGION_WEIGHT` / size over the anomalous pixels; all int64 [count].
    """
    sizes = sizes.flatten().to(index.device)
    anomalous = sizes != 0
    index_inside, sizes_inside = index[anomalous], sizes[anomalous].long()
    positive = torch.bincount(index_inside, minlength=count)
    weights = (REGION_WEIGHT + sizes_inside // 2) // sizes_inside
    region = torch.zeros_like(positive).index_add_(0, index_inside, weights)
    return torch.bincount(index, minlength=count) - positive, positive, region


def saturated_histogram(index: Tensor, areas: Tensor, count: int) -> Tensor:
    """Sums the weight of regions that saturate, per bin.

    At a threshold, a region's saturated overlap is min(flagged pixels / area of saturation, 1): its weight lies, in
    equal parts, on as many pixels as its area of saturation has, those of the highest scores. Where the area is all of
    the region, this is the region weight of `pixel_histograms`.

    Args:
        index: Bin of every pixel of an image [H * W].
        areas: Area of saturation in pixels on the pixels of a region, 0 elsewhere [regions, H, W]. A region without
            pixels has no weight.
        count: Number of bins.

    Returns:
        The sum of `REGION_WEIGHT` / area over these pixels, int64 [count].
    """
    total = torch.zeros(count, dtype=torch.int64, device=index.device)
    for region in areas.flatten(1).to(index.device):
        area = max(int(region.max()), 1)
        highest = index[region > 0].sort(descending=True).values[:area]
        total += torch.bincount(highest, minlength=count) * ((REGION_WEIGHT + area // 2) // area)
    return total
