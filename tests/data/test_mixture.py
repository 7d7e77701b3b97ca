import csv
import json
from pathlib import Path

import pytest
from helpers.images import picture
from helpers.refusals import refusal

from lit_fedad.core.building import build
from lit_fedad.core.config import compose
from lit_fedad.core.errors import UserError
from lit_fedad.data.mixture import mixture
from lit_fedad.data.sample import ImageSet, Sample


def reader(*products: str, masks=True):
    """A stand-in for a loader: four normal training images, four test images of each kind, per product."""

    def read(root: Path) -> ImageSet:
        train = [Sample(root / p / f"t{i}.png", p) for p in products for i in range(4)]
        test = []
        for p in products:
            test += [Sample(root / p / f"g{i}.png", p) for i in range(4)]
            mask = root / p / "mask.png" if masks else None
            test += [Sample(root / p / f"{d}{i}.png", p, d, mask) for d in ("dent", "hole") for i in range(4)]
        return ImageSet(root.name, tuple(train), tuple(test))

    return read


def test_parts_are_read_from_their_folders_and_joined_in_order(tmp_path):
    parts = {"B": reader("x", "y"), "A/deep": reader("z")}
    images = mixture(tmp_path, parts, "mix")
    first, second = reader("x", "y")(tmp_path / "B"), reader("z")(tmp_path / "A" / "deep")
    assert images == ImageSet("mix", first.train + second.train, first.test + second.test)
    assert images.categories == ["x", "y", "z"]
    assert mixture(str(tmp_path), parts, "mix") == images


def test_limits_hold_for_each_product_and_depend_on_no_other(tmp_path):
    parts = {"A": reader("x", "y"), "B": reader("z")}
    some = mixture(tmp_path, parts, "mix", train_per_product=2, test_per_product=4, seed=5)
    for product in ("x", "y", "z"):
        assert sum(sample.category == product for sample in some.train) == 2
        defects = [sample.defect for sample in some.test if sample.category == product]
        assert sorted(defects) == ["dent", "good", "good", "hole"]
    alone = mixture(tmp_path, {"B": reader("z")}, "z", train_per_product=2, test_per_product=4, seed=5)
    assert alone.train == tuple(sample for sample in some.train if sample.category == "z")
    assert alone.test == tuple(sample for sample in some.test if sample.category == "z")
    assert some != mixture(tmp_path, parts, "mix", train_per_product=2, test_per_product=4, seed=6)
    for key in ("train_per_product", "test_per_product"):
        with pytest.raises(UserError, match=f"{key}=0 must be at least 1"):
            mixture(tmp_path, parts, "mix", **{key: 0})


def test_a_part_without_masks_leaves_the_mixture_without(tmp_path):
    assert mixture(tmp_path, {"A": reader("x"), "B": reader("y")}, "mix").has_masks
    assert not mixture(tmp_path, {"A": reader("x"), "B": reader("y", masks=False)}, "mix").has_masks


def test_products_of_one_name_are_refused(tmp_path):
    with refusal("mix: product 'x' is in both A and B; leave it out"):
        mixture(tmp_path, {"A": reader("x"), "B": reader("y", "x")}, "mix")


@pytest.fixture
def pcb(tmp_path, monkeypatch):
    monkeypatch.setenv("LIT_FEDAD_CACHE", str(tmp_path / "cache"))
    visa, vision = tmp_path / "VisA", tmp_path / "VISION"
    rows = [["object", "split", "label", "image", "mask"]]
    for name in ("candle", "pcb1", "pcb2", "pcb3", "pcb4"):
        for i, (part, kind, label) in enumerate(
            [("train", "Normal", "normal"), ("test", "Normal", "normal"), ("test", "Anomaly", "anomaly")]
        ):
            image, mask = f"{name}/Data/Images/{kind}/{i}.JPG", f"{name}/Data/Masks/{kind}/{i}.png"
            picture(visa / image)
            picture(visa / mask)
            rows.append([name, part, label, image, mask if label == "anomaly" else ""])
    (visa / "split_csv").mkdir()
    with (visa / "split_csv" / "1cls.csv").open("w", newline="") as file:
        csv.writer(file).writerows(rows)
    annotations = {
        "categories": [{"id": 1, "name": "short"}],
        "images": [{"id": 1, "file_name": "1.jpg", "width": 16, "height": 12}],
        "annotations": [{"id": 1, "image_id": 1, "category_id": 1, "bbox": [4, 4, 2, 3], "segmentation": []}],
    }
    for folder in (vision / name / part for name in ("PCB_1", "PCB_2", "Wood") for part in ("train", "val")):
        picture(folder / "1.jpg")
        picture(folder / "good" / "2.jpg")
        (folder / "_annotations.coco.json").write_text(json.dumps(annotations))
    return tmp_path


def test_pcb_joins_visa_and_vision(pcb):
    images = build(compose(["data=pcb", f"data.root={pcb}"])["data"])
    assert images.name == "pcb"
    assert images.categories == ["pcb1", "pcb2", "pcb3", "pcb4", "PCB_1", "PCB_2"]
    assert len(images.train) == 6
    for product in images.categories:
        assert sorted(sample.label for sample in images.test if sample.category == product) == [0, 1]
    assert images.has_masks
    for sample in (*images.train, *images.test):
        assert sample.path.is_file()
        assert sample.mask is None or sample.mask.is_file()


def test_pcb_without_one_part_says_so(pcb):
    (pcb / "VISION").rename(pcb / "elsewhere")
    config = compose(["data=pcb", f"data.root={pcb}"])
    with refusal("VISION: no folder <set>/train/_annotations.coco.json"):
        build(config["data"])
