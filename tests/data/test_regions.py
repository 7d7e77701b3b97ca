"""Masks of MVTec LOCO: areas of saturation at every size, and files that are not as published."""

import json
from pathlib import Path

import pytest
import torch
from helpers.refusals import refusal
from PIL import Image

from lit_fedad.core.errors import UserError
from lit_fedad.data.regions import Saturation, read_saturations, saturation_areas
from lit_fedad.data.sample import Sample
from lit_fedad.data.transform import ImageTransform

DEFECTS = [
    {"defect_name": "missing", "pixel_value": 255, "saturation_threshold": 12, "relative_saturation": False},
    {"defect_name": "bent", "pixel_value": 254, "saturation_threshold": 0.5, "relative_saturation": True},
    {"defect_name": "cut", "pixel_value": 253, "saturation_threshold": 900, "relative_saturation": False},
]


def region(path: Path, value: int, box: tuple[int, int, int, int], mode: str = "L") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    image = Image.new("L", (16, 8), 0)
    image.paste(value, box)
    image.convert(mode).save(path)


@pytest.fixture
def sample(tmp_path):
    image = tmp_path / "000.png"
    Image.new("L", (16, 8), 90).save(image)
    masks = tmp_path / "masks" / "000"
    region(masks / "000.png", 255, (0, 0, 8, 4))  # 32 pixels
    region(masks / "001.png", 254, (6, 2, 10, 6))  # 16 pixels, some of them also in the first
    region(masks / "002.png", 253, (12, 6, 14, 8))  # 4 pixels
    areas = tmp_path / "defects_config.json"
    areas.write_text(json.dumps(DEFECTS))
    return Sample(image, "pushpins", "logical_anomalies", masks, areas)


def test_an_area_is_a_number_of_pixels_or_a_share_and_at_most_the_region(sample):
    assert read_saturations(sample.saturation)[254] == Saturation(0.5, True)
    areas = saturation_areas(sample, ImageTransform((8, 16)))
    assert areas.dtype == torch.int32
    assert [(int((part > 0).sum()), int(part.max())) for part in areas] == [(32, 12), (16, 8), (4, 4)]
    assert (areas[:2] > 0).all(0).sum() == 4  # of both regions: rows 2 and 3, columns 6 and 7


def test_pixels_of_the_file_are_scaled_with_the_image(sample):
    areas = saturation_areas(sample, ImageTransform((16, 32)))
    assert [(int((part > 0).sum()), int(part.max())) for part in areas] == [(128, 48), (64, 32), (16, 16)]
    assert saturation_areas(sample, ImageTransform((1, 2))).tolist() == [[[1, 0]], [[1, 1]], [[0, 1]]]
    cut = ImageTransform(4, fit="crop")  # the middle half: of the third region nothing is left
    assert len(saturation_areas(sample, cut)) == 2


def test_the_mask_of_other_metrics_is_the_union(sample):
    transform = ImageTransform((8, 16))
    union = (saturation_areas(sample, transform) > 0).any(0)
    assert torch.equal(transform.mask(sample.mask, sample.path), union.to(torch.uint8))


def test_a_normal_image_has_no_region(sample):
    assert saturation_areas(Sample(sample.path, "pushpins"), ImageTransform(4)).shape == (0, 4, 4)


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        ({"pixel_value": 0}, "pixel_value=0"),
        ({"saturation_threshold": -1}, "saturation_threshold=-1"),
        ({"saturation_threshold": float("nan")}, "saturation_threshold=nan"),
        ({"saturation_threshold": 1.5, "relative_saturation": True}, "saturation_threshold=1.5"),
        ({"relative_saturation": "no"}, "relative_saturation=no"),
        ({"saturation_threshold": 10**400}, "too large"),
        ({"pixel_value": 254}, "two defects of one pixel_value"),
    ],
)
def test_a_damaged_description_is_one_line(sample, change, cause):
    sample.saturation.write_text(json.dumps([DEFECTS[0] | change, DEFECTS[1]]))
    with refusal(cause):
        saturation_areas(sample, ImageTransform(4))


@pytest.mark.parametrize("text", ["{}", "[1]", "[{}]"])
def test_what_is_no_list_of_defects_is_refused(sample, text):
    sample.saturation.write_text(text)
    with pytest.raises(UserError, match="is no description of defects"):
        read_saturations(sample.saturation)


def test_masks_of_other_values_are_refused(sample):
    region(sample.mask / "000.png", 7, (0, 0, 4, 4))
    with pytest.raises(UserError, match="value 7, which"):
        saturation_areas(sample, ImageTransform(4))
    region(sample.mask / "000.png", 255, (0, 0, 4, 4), "RGB")
    with pytest.raises(UserError, match="is grey, with 0 and one value more"):
        saturation_areas(sample, ImageTransform(4))
