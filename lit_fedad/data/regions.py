"""Masks of MVTec LOCO: one file for each region, whose kind of defect says from which area on it counts as found.

A missing object may have lain anywhere in a large region, so that finding part of the region is finding the defect. A
region saturates at its area of saturation (Bergmann et al., "Beyond Dents and Scratches", IJCV 2022). The value of a
mask's pixels names its defect; ``defects_config.json`` of the product gives the area for each defect, as a number of
pixels or as a share of the region.
"""

import math
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lit_fedad.core.errors import UserError
from lit_fedad.data.image_files import images_in
from lit_fedad.data.input_files import read_json
from lit_fedad.data.pictures import open_picture
from lit_fedad.data.sample import Sample
from lit_fedad.data.transform import ImageTransform


class Saturation(NamedTuple):
    """Area from which on a region of a kind of defect counts as found.

    Attributes:
        threshold: Pixels of the file's resolution, or share of the region.
        relative: Whether it is a share.
    """

    threshold: float
    relative: bool

    def share(self, area: int) -> float:
        """Computes the share of a region of `area` pixels from which on it counts as found, in (0, 1]."""
        return min(1.0, self.threshold if self.relative else self.threshold / area)


def read_saturations(path: Path) -> dict[int, Saturation]:
    """Reads ``defects_config.json``: a list of defects with pixel value, threshold and whether it is relative.

    Args:
        path: The file.

    Returns:
        Saturations by the value of a mask's pixels.

    Raises:
        UserError: The file cannot be read, or an entry of it is not as described.
    """
    entries = read_json(path)
    try:
        if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
            raise ValueError("no list of defects")
        saturations = dict(_saturation(entry) for entry in entries)
        if len(saturations) < len(entries):
            raise ValueError("two defects of one pixel_value")
    except (ValueError, KeyError, OverflowError) as error:
        raise UserError(
            f"{path}: is no description of defects ({error}); unpack the download again"
        ) from None
    return saturations


def _saturation(entry: dict[str, object]) -> tuple[int, Saturation]:
    value, threshold, relative = (
        entry[key] for key in ("pixel_value", "saturation_threshold", "relative_saturation")
    )
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 255:
        raise ValueError(f"pixel_value={value}")
    if not isinstance(relative, bool):
        raise ValueError(f"relative_saturation={relative}")
    highest = 1.0 if relative else math.inf
    if isinstance(threshold, bool) or not isinstance(threshold, int | float) or not 0 < threshold <= highest:
        raise ValueError(f"saturation_threshold={threshold}")
    return value, Saturation(float(threshold), relative)


def saturation_areas(sample: Sample, transform: ImageTransform) -> Tensor:
    """Reads an image's regions, with their areas of saturation at the transform's size.

    The area is the same share of the region at every size, to the nearest pixel, and at least one.

    Args:
        sample: The image; one without masks by region has no region.
        transform: Gives masks the form of images.

    Returns:
        For each region its area of saturation, in pixels, on its own pixels and 0 elsewhere, int32 [regions, H, W];
        regions of which no pixel is left at this size are missing.

    Raises:
        UserError: A mask cannot be read, holds no single value, or one that the product's defects do not have.
    """
    if sample.mask is None or sample.saturation is None:
        return torch.zeros((0, *transform.shape), dtype=torch.int32)
    saturations = read_saturations(sample.saturation)
    areas = []
    for path in images_in(sample.mask):
        mask = transform.mask(path, sample.path).int()
        value, area = _value_and_area(path, transform.page)
        if value not in saturations:
            raise UserError(f"{path}: pixels of value {value}, which {sample.saturation} does not name")
        if size := int(mask.sum()):
            areas.append(mask * max(1, round(saturations[value].share(area) * size)))
    return torch.stack(areas) if areas else torch.zeros((0, *transform.shape), dtype=torch.int32)


def _value_and_area(path: Path, page: int | None) -> tuple[int, int]:
    """Reads the value of a region's pixels, and their number in the file."""
    image = open_picture(path, page, alone=True).image
    values, counts = np.unique(np.asarray(image), return_counts=True)
    grey = image.mode == "L"
    inside = values > 0
    if not grey or inside.sum() != 1:
        raise UserError(
            f"{path}: a region's mask is grey, with 0 and one value more; unpack the download again"
        )
    return int(values[inside][0]), int(counts[inside][0])
