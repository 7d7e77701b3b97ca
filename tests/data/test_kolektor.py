import shutil
from pathlib import Path

import pytest
from helpers.images import picture
from helpers.refusals import refused

from lit_fedad.core.building import build
from lit_fedad.core.config import compose
from lit_fedad.data.anomaly_sets import kolektor_sdd2
from lit_fedad.data.check import check


def add(folder: Path, number: int, marked: bool) -> None:
    picture(folder / f"{number}.png", (number % 97, 90, 90))
    picture(folder / f"{number}_GT.png", 0, mark=255 * marked)


@pytest.fixture
def root(tmp_path):
    for number, marked in ((10000, False), (10001, True), (10002, False)):
        add(tmp_path / "train", number, marked)
    for number, marked in ((20000, True), (20001, False)):
        add(tmp_path / "test", number, marked)
    return tmp_path


def test_masks_say_what_is_anomalous_and_defects_are_not_learnt(root):
    with pytest.warns(UserWarning, match="1 of 3 training images show a defect and are left out"):
        images = kolektor_sdd2(root)
    assert [sample.name for sample in images.train] == ["10000.png", "10002.png"]
    found = [(sample.name, sample.defect, sample.mask and sample.mask.name) for sample in images.test]
    assert sorted(found) == [("20000.png", "defect", "20000_GT.png"), ("20001.png", "good", None)]
    assert images.has_masks
    assert check(images) == []


def test_the_configuration_reads_it(root):
    (root / "train/10001.png").unlink()
    (root / "train/10001_GT.png").unlink()
    assert build(compose(["data=kolektor_sdd2", f"data.root={root}"])["data"]) == kolektor_sdd2(root)


def test_what_is_missing_or_damaged_is_one_line(root):
    mask = root / "test/20001_GT.png"
    mask.write_bytes(b"\x89PNG no more")
    refused("cannot be read as an image", kolektor_sdd2, root)
    mask.unlink()
    refused(r"20001\.png: no mask 20001_GT\.png beside it \(1 of 2", kolektor_sdd2, root)
    (root / "test").rename(root / "tests")
    refused("test: no such folder", kolektor_sdd2, root)


def test_the_copies_in_the_archive_are_left_out(root):
    for name in ("10001", "10001_GT"):
        shutil.copy(root / "train" / f"{name}.png", root / "train" / f"{name} (copy).png")
    with pytest.warns(UserWarning, match=r"skipped copies \(2, first .*10001 \(copy\)\.png"):
        images = kolektor_sdd2(root)
    assert [sample.name for sample in images.train] == ["10000.png", "10002.png"]


def test_images_of_one_name_in_two_folders_keep_their_own_masks(root):
    for folder, marked in (("a", True), ("b", False)):
        add(root / "test" / folder, 1, marked)
    with pytest.warns(UserWarning, match="show a defect"):
        images = kolektor_sdd2(root)
    found = {sample.path.parent.name: sample.defect for sample in images.test if sample.name == "1.png"}
    assert found == {"a": "defect", "b": "good"}
