import csv
from pathlib import Path

import pytest
from helpers.images import picture
from helpers.refusals import refused

from lit_fedad.core.building import build
from lit_fedad.core.config import compose
from lit_fedad.data.anomaly_sets import visa
from lit_fedad.data.transform import ImageTransform


def add_object(root: Path, name: str, normal=5, anomalous=2, train=3) -> list[list[str]]:
    """An object's files as the archive has them; its rows of 1cls.csv."""
    rows = []
    for i in range(normal):
        image = f"{name}/Data/Images/Normal/{i:04}.JPG"
        picture(root / image)
        rows.append([name, "train" if i < train else "test", "normal", image, ""])
    for i in range(anomalous):
        image, mask = (f"{name}/Data/{kind}/Anomaly/{i:03}" for kind in ("Images", "Masks"))
        picture(root / f"{image}.JPG")
        picture(root / f"{mask}.png", 0, mark=1 + i)  # small class numbers, as VisA's masks have
        rows.append([name, "test", "anomaly", f"{image}.JPG", f"{mask}.png"])
    (root / name / "image_anno.csv").write_text("image,label,mask\n")
    return rows


def write_split(root: Path, rows, header="object,split,label,image,mask", name="1cls.csv") -> Path:
    table = root / "split_csv" / name
    table.parent.mkdir(exist_ok=True)
    with table.open("w", newline="") as file:
        csv.writer(file).writerows([header.split(","), *rows])
    return table


@pytest.fixture
def root(tmp_path):
    root = tmp_path / "VisA"
    rows = [row for name in ("candle", "pcb1", "pcb2") for row in add_object(root, name)]
    write_split(root, rows)
    return root


def test_split_labels_and_masks_are_those_of_the_file(root):
    images = visa(root, ["pcb2", "candle"])
    assert images.categories == ["pcb2", "candle"]
    own = [sample for sample in images.train if sample.category == "pcb2"]
    assert [sample.path for sample in own] == [root / f"pcb2/Data/Images/Normal/{i:04}.JPG" for i in range(3)]
    assert not any(sample.label or sample.mask for sample in images.train)
    own = [sample for sample in images.test if sample.category == "pcb2"]
    assert [(sample.path.relative_to(root / "pcb2/Data").as_posix(), sample.defect) for sample in own] == [
        ("Images/Normal/0003.JPG", "good"),
        ("Images/Normal/0004.JPG", "good"),
        ("Images/Anomaly/000.JPG", "anomaly"),
        ("Images/Anomaly/001.JPG", "anomaly"),
    ]
    masks = [None, None, *(root / f"pcb2/Data/Masks/Anomaly/00{i}.png" for i in range(2))]
    assert [sample.mask for sample in own] == masks
    assert images.has_masks


def test_class_numbers_in_masks_are_anomalous(root):
    for sample in visa(root, ["pcb1"]).test:
        mask = ImageTransform((12, 16)).mask(sample.mask, sample.path)
        assert mask.nonzero().tolist() == ([[5, 3]] if sample.label else [])


def test_all_objects_are_read_by_default_and_limits_hold_for_each(root):
    assert visa(root).categories == ["candle", "pcb1", "pcb2"]
    some = visa(str(root), train_per_product=2, test_per_product=2, seed=3)
    for product in ("candle", "pcb1", "pcb2"):
        assert sum(sample.category == product for sample in some.train) == 2
        assert [sample.defect for sample in some.test if sample.category == product] == ["good", "anomaly"]


def test_an_unknown_object_names_the_nearest(root):
    refused("no product 'pbc1'; the nearest is 'pcb1'", visa, root, ["pbc1"])
    refused("pcb1 is listed twice", visa, root, ["pcb1", "pcb1"])
    refused("the list is empty", visa, root, [])


def test_a_missing_split_file_is_named(root):
    refused(r"split_csv/2cls\.csv: no such file", visa, root, split_csv="split_csv/2cls.csv")
    refused(r"none/split_csv/1cls\.csv: no such file", visa, root / "none")


def test_missing_files_are_named_only_for_the_objects_asked_for(root):
    (root / "pcb1/Data/Images/Normal/0004.JPG").unlink()
    refused(r"Normal/0004\.JPG, which is not there \(1 of 9 files missing\)", visa, root, ["pcb1"])
    assert len(visa(root, ["pcb2"]).train) == 3
    (root / "candle/Data/Masks/Anomaly/001.png").unlink()
    refused(r"Masks/Anomaly/001\.png, which is not there", visa, root, ["candle"])


def test_other_files_are_refused(root):
    rows = [["pcb1", "train", "normal", "pcb1/Data/Images/Normal/0000.JPG", ""]]
    write_split(root, rows, header="object,set,label,image,mask")
    refused("no column 'split'", visa, root)
    write_split(root, [*rows, ["pcb1", "test", "bad", "x.JPG", ""]])
    refused("line 3 has split 'test', label 'bad'", visa, root)
    write_split(root, [["pcb1", "test", "normal"]])
    refused("line 2 .* and image ''", visa, root)
    for outside in (["../x.JPG", ""], ["x.JPG", "/x.png"]):
        write_split(root, [["pcb1", "test", "anomaly", *outside]])
        refused(r"1cls\.csv: .*x\.(JPG|png)' lies outside", visa, root)
    write_split(root, [])
    refused("holds no row", visa, root)


def test_splits_that_train_on_anomalies_are_refused(root):
    row = ["pcb1", "train", "anomaly", "pcb1/Data/Images/Anomaly/000.JPG", "pcb1/Data/Masks/Anomaly/000.png"]
    write_split(root, [row], name="2cls_highshot.csv")
    refused(
        "shows 'anomaly', but is for training; use another data.split_csv",
        visa,
        root,
        split_csv="split_csv/2cls_highshot.csv",
    )


def test_the_configuration_reads_it(root):
    config = compose(["data=visa", f"data.root={root}", "data.products=[pcb1]"])
    images = build(config["data"])
    assert images == visa(root, ["pcb1"])
    assert images.name == "visa"
