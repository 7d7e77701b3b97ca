import json
import os
import stat
import warnings
from pathlib import Path

import numpy as np
import pytest
from helpers.refusals import refused
from PIL import Image

from lit_fedad.core.building import build
from lit_fedad.core.config import compose
from lit_fedad.data.transform import ImageTransform
from lit_fedad.data.vision import vision

DENT = [2, 3, 6, 3, 6, 8, 2, 8]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("LIT_FEDAD_CACHE", str(tmp_path / "cache"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield tmp_path / "cache"


def split(folder: Path, defects, good=0, labelled=True) -> None:
    """A folder as published: images with numbers for names, annotations beside them."""
    folder.mkdir(parents=True)
    content = {"categories": [{"id": 0, "name": "PCB"}, {"id": 1, "name": "dent"}, {"id": 2, "name": "hole"}]}
    content["images"], content["annotations"] = [], []
    for i, defect in enumerate(defects):
        name = f"{i:06}.jpg"
        Image.new("RGB", (16, 12), (i, 0, 0)).save(folder / name)
        content["images"].append({"id": i, "file_name": name, "width": 16, "height": 12})
        if defect and labelled:
            box = [2, 3, 4, 5]
            content["annotations"].append(
                {
                    "id": i,
                    "image_id": i,
                    "category_id": defect,
                    "bbox": box,
                    "segmentation": [DENT],
                    "iscrowd": 0,
                }
            )
    (folder / "_annotations.coco.json").write_text(json.dumps(content))
    for i in range(good):
        (folder / "good").mkdir(exist_ok=True)
        Image.new("RGB", (16, 12)).save(folder / "good" / f"n{i}.jpg")


def add_set(root: Path, name: str, good=2, train=(1, 2), val=(2, 1, 1)) -> Path:
    split(root / name / "train", train, good)
    split(root / name / "val", val, good)
    split(root / name / "inference", (1, 1, 1, 1), labelled=False)
    return root


@pytest.fixture
def root(tmp_path):
    return add_set(add_set(tmp_path / "VISION", "PCB_1"), "PCB_2")


def test_training_is_normal_and_testing_is_val(root):
    images = vision(root, ["PCB_2"])
    folder = root / "PCB_2"
    assert [sample.path for sample in images.train] == [folder / f"train/good/n{i}.jpg" for i in range(2)]
    assert not any(sample.label or sample.mask for sample in images.train)
    assert [
        (sample.path.relative_to(folder / "val").as_posix(), sample.defect) for sample in images.test
    ] == [
        ("000000.jpg", "hole"),
        ("000001.jpg", "dent"),
        ("000002.jpg", "dent"),
        ("good/n0.jpg", "good"),
        ("good/n1.jpg", "good"),
    ]
    assert images.has_masks
    assert vision(root).categories == ["PCB_1", "PCB_2"]


def test_images_listed_without_annotations_are_normal(tmp_path):
    root = add_set(tmp_path / "VISION", "Cable", good=0, train=(1, 0, 0), val=(0, 2))
    images = vision(root)
    assert [sample.path.name for sample in images.train] == ["000001.jpg", "000002.jpg"]
    assert [(sample.label, sample.mask is None) for sample in images.test] == [(1, False), (0, True)]


def test_masks_are_drawn_once_into_the_cache(root, cache):
    images = vision(root, ["PCB_1"])
    masks = [sample.mask for sample in images.test if sample.label]
    assert len(set(masks)) == 3
    assert all(mask.is_relative_to(cache / "masks") for mask in masks)
    assert sorted(masks[0].parent.iterdir()) == sorted(masks)  # nothing half-written is left
    expected = np.zeros((12, 16), dtype=np.uint8)
    expected[3:8, 2:6] = 255
    for mask in masks:
        with Image.open(mask) as pixels:
            assert (np.asarray(pixels) == expected).all()
        assert stat.S_IMODE(mask.stat().st_mode) & 0o444 == 0o444 & ~_umask()
    assert ImageTransform(12, fit="crop", resize=12).mask(masks[0], images.test[0].path).any()

    before = [mask.stat().st_mtime_ns for mask in masks]
    masks[1].unlink()
    assert vision(root, ["PCB_1"]) == images
    after = [mask.stat().st_mtime_ns for mask in masks]
    assert (after[0], after[2]) == (before[0], before[2])


def test_images_of_one_name_in_two_folders_keep_their_own_masks(root, tmp_path):
    file = root / "PCB_1" / "val" / "_annotations.coco.json"
    content = json.loads(file.read_text())
    for image in content["images"][:2]:
        name = f"camera{image['id']}/0.jpg"
        (file.parent / name).parent.mkdir()
        (file.parent / image["file_name"]).rename(file.parent / name)
        image["file_name"] = name
    content["annotations"][0]["segmentation"] = [[0, 0, 3, 0, 3, 3, 0, 3]]
    file.write_text(json.dumps(content))
    images = vision(root, ["PCB_1"], mask_folder=tmp_path / "masks")
    areas = {}
    for sample in images.test:
        if sample.mask:
            with Image.open(sample.mask) as pixels:
                areas[sample.path.relative_to(file.parent).as_posix()] = (np.asarray(pixels) > 0).sum()
    assert areas == {"000002.jpg": 20, "camera0/0.jpg": 9, "camera1/0.jpg": 20}


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_other_annotations_get_other_masks(root, tmp_path):
    first = vision(root, ["PCB_1"], mask_folder=tmp_path / "masks")
    file = root / "PCB_1" / "val" / "_annotations.coco.json"
    content = json.loads(file.read_text())
    content["annotations"][0]["segmentation"] = [[0, 0, 3, 0, 3, 3, 0, 3]]
    file.write_text(json.dumps(content))
    second = vision(root, ["PCB_1"], mask_folder=tmp_path / "masks")
    assert first.test[0].mask != second.test[0].mask
    for images, area in ((first, 20), (second, 9)):
        with Image.open(images.test[0].mask) as pixels:
            assert (np.asarray(pixels) > 0).sum() == area


def test_only_chosen_masks_are_drawn(root, tmp_path):
    images = vision(root, mask_folder=tmp_path / "masks", train_per_product=1, test_per_product=2)
    assert [sample.defect == "good" for sample in images.test] == [False, True] * 2
    assert len(images.train) == 2
    assert len(list((tmp_path / "masks").glob("*/*.png"))) == 2


def test_a_set_as_published_has_no_normal_images(tmp_path):
    root = add_set(tmp_path / "VISION", "PCB_1", good=0)
    refused(r"PCB_1/train: each of its 2 images has a defect.* into .*train/good", vision, root)
    (root / "PCB_1/train/good").mkdir()
    Image.new("L", (16, 12)).save(root / "PCB_1/train/good/n.png")
    (root / "PCB_1/train/good/.hidden.png").touch()
    (root / "PCB_1/train/good/notes.txt").touch()
    with (
        pytest.warns(UserWarning, match=r"no normal test image; sort some into .*val/good"),
        pytest.warns(UserWarning, match=r"no image \(1, first .*notes\.txt"),
    ):
        images = vision(root)
    assert [sample.path.name for sample in images.train] == ["n.png"]
    assert all(sample.label for sample in images.test)


def test_missing_parts_are_named(root, tmp_path):
    refused("no product 'PCB1'; the nearest is 'PCB_1'", vision, root, ["PCB1"])
    refused("no folder <set>/train/_annotations.coco.json", vision, tmp_path / "none")
    (root / "PCB_2/val/000001.jpg").unlink()
    refused(r"000001\.jpg, which is not there \(1 of 3 files missing\)", vision, root, ["PCB_2"])
    (root / "PCB_1/val/_annotations.coco.json").unlink()
    refused(r"PCB_1/val/_annotations\.coco\.json: no such file", vision, root, ["PCB_1"])


def test_a_mask_folder_that_cannot_be_written_is_named(root, tmp_path):
    (tmp_path / "file").touch()
    refused("cannot be written .*choose another mask_folder", vision, root, mask_folder=tmp_path / "file")


def test_the_configuration_reads_it(root):
    config = compose(["data=vision", f"data.root={root}", "data.products=[PCB_1]"])
    assert build(config["data"]) == vision(root, ["PCB_1"])
