from collections import Counter
from pathlib import Path

import pytest
from helpers.images import picture
from helpers.refusals import refused

from lit_fedad.core.building import build
from lit_fedad.core.config import compose
from lit_fedad.data.anomaly_sets import texture_ad


def material(folder: Path, products=14) -> Path:
    for number in range(1, products + 1):
        for i in range(3):
            picture(folder / str(number) / "train" / "good" / f"Image_{i}.png")
        for part in ("test/good", "test/0", "ground_truth/0"):
            for i in range(2):
                picture(folder / str(number) / part / f"Image_{i}.png")
    (folder / "meta.json").write_text("{}")
    return folder


def test_fourteen_wafers_by_number(tmp_path):
    folder = material(tmp_path / "wafer_mvtec_format")
    images = texture_ad(tmp_path)
    assert images.name == "wafer"
    assert images.categories == [f"wafer_{number}" for number in range(1, 15)]
    own = [sample for sample in images.test if sample.category == "wafer_3"]
    assert [(sample.path.relative_to(folder).as_posix(), sample.defect) for sample in own] == [
        ("3/test/0/Image_0.png", "0"),
        ("3/test/0/Image_1.png", "0"),
        ("3/test/good/Image_0.png", "good"),
        ("3/test/good/Image_1.png", "good"),
    ]
    assert [sample.mask for sample in own] == [
        *(folder / f"3/ground_truth/0/Image_{i}.png" for i in range(2)),
        None,
        None,
    ]
    assert Counter(sample.category for sample in images.train) == dict.fromkeys(images.categories, 3)
    assert images.has_masks


@pytest.mark.parametrize("inside", ["", "wafer_mvtec_format", "Wafer", "Wafer/wafer_mvtec_format"])
def test_the_folder_may_be_named_at_any_level(tmp_path, inside):
    material(tmp_path / inside, products=2)
    assert texture_ad(tmp_path).categories == ["wafer_1", "wafer_2"]


def test_materials_do_not_mix(tmp_path):
    material(tmp_path / "wafer_mvtec_format", products=2)
    material(tmp_path / "cloth_mvtec_format", products=3)
    assert texture_ad(tmp_path, "cloth").categories == ["cloth_1", "cloth_2", "cloth_3"]
    assert texture_ad(tmp_path).categories == ["wafer_1", "wafer_2"]
    refused("no numbered folder .* metal_mvtec_format", texture_ad, tmp_path, "metal")


def test_products_and_limits(tmp_path):
    material(tmp_path, products=3)
    images = texture_ad(tmp_path, products=[3, 1], name="two", train_per_product=1, test_per_product=2)
    assert (images.name, images.categories) == ("two", ["wafer_3", "wafer_1"])
    assert [(sample.category, sample.defect) for sample in images.test] == [
        (product, defect) for product in images.categories for defect in ("0", "good")
    ]
    assert len(images.train) == 2
    refused("no product '33'; the nearest is '3'", texture_ad, tmp_path, products=[33])


def test_other_layouts_are_refused(tmp_path):
    refused("no numbered folder with train/good", texture_ad, tmp_path)
    picture(tmp_path / "bottle" / "train" / "good" / "0.png")
    refused("no numbered folder with train/good .* use data=mvtec_mixture", texture_ad, tmp_path)


def test_a_missing_mask_is_named(tmp_path):
    material(tmp_path, products=1)
    (tmp_path / "1/ground_truth/0/Image_1.png").unlink()
    refused(r"1/test/0/Image_1\.png: no mask", texture_ad, tmp_path)


def test_the_configuration_reads_it(tmp_path):
    material(tmp_path / "wafer_mvtec_format")
    whole = build(compose(["data=wafer", f"data.root={tmp_path}"])["data"])
    assert whole == texture_ad(tmp_path)
    some = build(compose(["data=wafer", f"data.root={tmp_path}", "data.products=[2,10]"])["data"])
    assert some.categories == ["wafer_2", "wafer_10"]
