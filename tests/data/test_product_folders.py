"""MVTec AD 2, MVTec LOCO, BTAD and BMAD in their published layouts, read as their configurations say."""

import json
import shutil
from pathlib import Path

import pytest
from helpers.images import picture
from helpers.refusals import refused

from lit_fedad.core.building import build
from lit_fedad.core.config import compose
from lit_fedad.data.check import check


def mvtec_ad2(root):
    for product in ("can", "vial"):
        for i in range(3):
            picture(root / product / "train/good" / f"{i:03}_regular.png", 10 + i)
        picture(root / product / "validation/good/000_regular.png", 20)
        picture(root / product / "test_public/good/000_overexposed.png", 30)
        for i in range(2):
            picture(root / product / "test_public/bad" / f"{i:03}_shift_1.png", 40 + i)
            mask = root / product / "test_public/ground_truth/bad" / f"{i:03}_shift_1_mask.png"
            picture(mask, 0, mark=255)
        picture(root / product / "test_private/000.png", 50)
    return {"can": (3, 1, 2), "vial": (3, 1, 2)}


def mvtec_loco(root):
    for product in ("pushpins", "screw_bag"):
        for i in range(2):
            picture(root / product / "train/good" / f"{i:03}.png", 10 + i)
        picture(root / product / "validation/good/000.png", 20)
        picture(root / product / "test/good/000.png", 30)
        picture(root / product / "test/structural_anomalies/000.png", 40)
        picture(root / product / "ground_truth/structural_anomalies/000/000.png", 0, mark=255)
        entry = {"pixel_value": 255, "saturation_threshold": 0.5, "relative_saturation": True}
        (root / product / "defects_config.json").write_text(json.dumps([{"defect_name": "cut", **entry}]))
    for i in range(2):
        picture(root / "pushpins/test/logical_anomalies" / f"{i:03}.png", 50 + i)
        for region in range(2):
            mask = root / "pushpins/ground_truth/logical_anomalies" / f"{i:03}" / f"{region:03}.png"
            picture(mask, 0, mark=255)
    return {"pushpins": (2, 1, 3), "screw_bag": (2, 1, 1)}


def btad(root):
    for product, suffix in (("01", "bmp"), ("02", "png")):
        for i in range(2):
            picture(root / product / "train/ok" / f"{i:04}.{suffix}", 10 + i)
        picture(root / product / f"test/ok/0002.{suffix}", 30)
        picture(root / product / f"test/ko/0003.{suffix}", 40)
        picture(root / product / "ground_truth/ko/0003.png", 0, mark=255)
    return {"01": (2, 1, 1), "02": (2, 1, 1)}


def bmad(root):
    for i in range(2):
        picture(root / "Brain/train/good/img" / f"00003_6{i}.png", 10 + i)
        picture(root / "camelyon16/train/good" / f"100{i}.png", 20 + i)
    picture(root / "Brain/test/good/img/00000_96.png", 30)
    picture(root / "Brain/test/Ungood/img/00002_60.png", 40)
    picture(root / "Brain/test/Ungood/label/00002_60.png", 0, mark=255)
    picture(root / "Brain/valid/good/img/00025_99.png", 50)
    picture(root / "camelyon16/test/good/1000.png", 60)
    picture(root / "camelyon16/test/Ungood/100.png", 70)
    return {"Brain": (2, 1, 1), "camelyon16": (2, 1, 1)}


SETS = {"mvtec_ad2": mvtec_ad2, "mvtec_loco": mvtec_loco, "btad": btad, "bmad": bmad}


def read(name, root, *overrides):
    return build(compose([f"data={name}", f"data.root={root}", *overrides])["data"])


@pytest.mark.parametrize("name", SETS)
def test_the_published_layout_is_read_and_whole(tmp_path, name):
    expected = SETS[name](tmp_path)
    images = read(name, tmp_path)
    assert images.name == name
    for product, counts in expected.items():
        test = [sample for sample in images.test if sample.category == product]
        learnt = sum(sample.category == product for sample in images.train)
        found = (learnt, sum(not s.label for s in test), sum(s.label for s in test))
        assert found == counts, product
    assert images.categories == list(expected)
    assert check(images) == []


def test_masks_are_those_of_the_images(tmp_path):
    mvtec_ad2(tmp_path)
    bad = [sample for sample in read("mvtec_ad2", tmp_path).test if sample.label]
    assert [sample.mask.name for sample in bad] == [f"{sample.path.stem}_mask.png" for sample in bad]
    (tmp_path / "vial/test_public/ground_truth/bad/001_shift_1_mask.png").unlink()
    refused(r"001_shift_1\.png: no mask", read, "mvtec_ad2", tmp_path)


def test_sets_without_masks_have_image_metrics_alone(tmp_path):
    bmad(tmp_path / "bmad")
    assert not read("bmad", tmp_path / "bmad").has_masks  # one of its sets has none
    brain = read("bmad", tmp_path / "bmad", "data.products=[Brain]")
    assert brain.has_masks
    assert brain.test[1].mask.as_posix().endswith("Ungood/label/00002_60.png")


def test_masks_of_loco_are_folders_with_areas_of_saturation(tmp_path):
    mvtec_loco(tmp_path)
    images = read("mvtec_loco", tmp_path)
    assert images.has_saturation
    found = {sample.path.relative_to(tmp_path): sample for sample in images.test}
    logical = found[Path("pushpins/test/logical_anomalies/001.png")]
    assert logical.mask == tmp_path / "pushpins/ground_truth/logical_anomalies/001"
    assert logical.saturation == tmp_path / "pushpins/defects_config.json"
    assert found[Path("pushpins/test/good/000.png")].mask is None
    picture(logical.mask / "001.png", 0)  # marks nothing
    (problem,) = [problem.message for problem in check(images)]
    assert "001.png: a region's mask is grey, with 0 and one value more" in problem
    (tmp_path / "screw_bag/defects_config.json").unlink()
    refused("screw_bag: no defects_config.json; unpack", read, "mvtec_loco", tmp_path)
    shutil.rmtree(logical.mask)
    refused("logical_anomalies: no 001; unpack", read, "mvtec_loco", tmp_path)


def test_numbers_are_products_too(tmp_path):
    btad(tmp_path)
    assert read("btad", tmp_path, "data.products=['02']").categories == ["02"]


def test_what_is_missing_is_one_line(tmp_path):
    refused("no such folder", read, "btad", tmp_path / "none")
    refused("no product folder with train/ok directly inside", read, "btad", tmp_path)
    btad(tmp_path)
    refused("no product '04'; the nearest is '0", read, "btad", tmp_path, "data.products=['04']")
    (tmp_path / "01/test/ok").rename(tmp_path / "01/test/others")
    refused("01: no test/ok; unpack the download again", read, "btad", tmp_path)
    (tmp_path / "01/test/others").rename(tmp_path / "01/test/ok")
    (tmp_path / "01/test/ko").rename(tmp_path / "01/test/others")
    refused("01: no test/ko; unpack the download again", read, "btad", tmp_path)
